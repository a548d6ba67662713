// What runs now: runs of this machine's folder with their speed and memory, and the fleet's queue.

import { make } from "./report/dom.js";
import { commandElement, figureElement } from "./report/page.js";
import { formatShare, formatValue } from "./report/format.js";
import { follow, get, post } from "./api.js";
import { button, messagePlace } from "./forms.js";
import { WorkPanel, listeners, release, showFigures } from "./work.js";

const OVER = ["done", "failed", "cancelled", "lost"];

// Return how long ago something was, in words.
export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "never";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s ago`;
  return whole < 7200 ? `${Math.round(whole / 60)} min ago` : `${Math.round(whole / 3600)} h ago`;
}

function cells(values) {
  return values.map((value) => make("td", {}, value ?? "-"));
}

function table(titles, rows, caption) {
  const head = titles.map((title) => make("th", { scope: "col" }, title));
  return make("div", { class: "table-holder" }, make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

function stateMark(state) {
  return make("span", { class: `state ${state}` }, state);
}

function speed(run) {
  if (!run.step_s) return "-";
  const words = formatValue(run.step_s, "s");
  return run.change === null ? words : `${words} (${formatShare(run.change, true)})`;
}

export async function liveView(app, values) {
  const heard = make("p", { class: "note heard", role: "status" });
  const message = messagePlace();
  message.show(null);
  const runs = make("div", {});
  const detail = make("section", { class: "run-detail" });
  const fleet = make("div", {});
  const energy = make("div", {});
  const versions = new Map();
  const changes = [];
  const panel = new WorkPanel(app.page);
  const figures = make("div", { class: "report" });
  app.root.replaceChildren(make("h1", {}, "Live"), heard, message.element, make("h2", {}, "Runs"), runs, detail, panel.element, figures, make("h2", {}, "Fleet"), fleet, energy);
  let last = 0;
  let shown = "";
  let kept = null;
  let chosen = values.run || "";
  const tick = setInterval(() => {
    if (last) heard.textContent = `last heard ${ago((performance.now() - last) / 1000)}`;
  }, 1000);

  async function showRun(name) {
    try {
      const found = await get(`/live/runs/${encodeURIComponent(name)}`);
      if (chosen !== name) return;
      const facts = [
        [found.state, "state"],
        [found.steps ? `${found.step} of ${found.steps}` : String(found.step), "step"],
        [found.loss === null || found.loss === undefined ? "-" : String(Number(found.loss.toPrecision(5))), "loss"],
        [speed(found), "step, against the prediction"],
        [found.predicted_s ? formatValue(found.predicted_s, "s") : "-", "step, predicted"],
        [found.memory_bytes ? formatValue(found.memory_bytes, "bytes") : "-", "most memory of a rank"],
      ];
      kept = kept || listeners(app.page);
      release(app.page, kept);
      const drawn = found.figures.map((figure) => figureElement(figure, app.page));
      const lines = found.lines.length ? make("pre", { class: "log", tabindex: 0, "aria-label": "last lines of the log" }, found.lines.join("\n")) : null;
      const events = found.events.map((each) => make("li", {}, each));
      const report = found.state === "ended" ? button("Predicted over measured", async () => {
        try {
          const job = await post(`/live/runs/${encodeURIComponent(name)}/page`, {});
          const done = job.state === "done" ? job : await panel.wait(job);
          panel.running.hidden = true;
          if (done && done.state === "done") await showFigures(figures, done, app.page);
          else if (done) message.show(done.error);
        } catch (error) {
          message.show(error);
        }
      }) : null;
      const parts = [
        make("h3", {}, name),
        found.note ? make("p", { class: "note" }, found.note) : null,
        make("dl", { class: "facts" }, ...facts.map(([value, words]) => make("div", { class: "fact" }, make("dt", {}, words), make("dd", {}, value)))),
        events.length ? make("div", {}, make("h3", { class: "title" }, "What happened"), make("ul", { class: "events" }, ...events)) : null,
        make("div", { class: "side-by-side" }, ...drawn.map(({ element }) => element)),
        lines,
        report ? make("p", { class: "actions" }, report) : null,
      ];
      detail.replaceChildren(...parts.filter((part) => part));
      await Promise.all(drawn.map(({ done }) => done));
      document.documentElement.dataset.run = `${found.state} ${found.step}`;
    } catch (error) {
      message.show(error);
    }
  }

  function choose(name) {
    chosen = name;
    figures.replaceChildren();
    app.address({ run: name }, true);
    showRun(name);
  }

  function show(found) {
    const rows = found.runs.map((run) => {
      const link = make("a", { href: `/ui/live?run=${encodeURIComponent(run.name)}` }, run.name);
      link.addEventListener("click", (event) => {
        event.preventDefault();
        choose(run.name);
      });
      const step = run.steps ? `${run.step} of ${run.steps}` : run.step;
      return make("tr", {}, make("td", {}, link), make("td", {}, stateMark(run.state)), ...cells([step, run.loss === null || run.loss === undefined ? "-" : Number(run.loss.toPrecision(5)), speed(run), ago(found.at_s - run.heard_s)]));
    });
    runs.replaceChildren(rows.length ? table(["run", "state", "step", "loss", "time of a step", "wrote"], rows, "runs") : make("p", { class: "note" }, `no runs under ${found.folder}`), commandElement(found.command));
    fleet.replaceChildren(...fleetParts(found.fleet, found.at_s));
    if (found.energy) energy.replaceChildren(make("h2", {}, "Energy jobs"), ...energyParts(found.energy, noteClocks(found, versions, changes)));
    const text = JSON.stringify(found.runs.find((run) => run.name === chosen) || null);
    if (chosen && text !== shown) showRun(chosen);
    shown = text;
    document.documentElement.dataset.live = `${found.runs.length} ${found.fleet.jobs ? found.fleet.jobs.length : "-"}`;
  }

  const live = (found) => {
    last = performance.now();
    message.show(null);
    show(found);
  };
  const beat = () => {
    last = performance.now();
    message.show(null);
  };
  const end = follow("/live/events", { live, beat, lost: (error) => message.show(error) }, { path: "/live", name: "live" });
  app.onLeave(() => {
    end();
    clearInterval(tick);
    panel.end();
  });
  show(await get("/live"));
  last = performance.now();
  heard.textContent = "last heard 0 s ago";
}

// Note which jobs of the energy server got other clocks, or another straggler, since the last look.
export function noteClocks(found, versions, changes) {
  for (const job of found.energy.jobs || []) {
    const slow = job.stragglers.length;
    const [version, before] = versions.get(job.job_id) || [];
    const clock = new Date(found.at_s * 1000).toLocaleTimeString("en-GB");
    if (version !== undefined && job.version !== version) changes.unshift(`${clock} ${job.job_id}: clocks of version ${job.version}`);
    if (before !== undefined && slow !== before) changes.unshift(`${clock} ${job.job_id}: ${slow ? `${slow} straggler${slow > 1 ? "s" : ""}` : "no straggler any more"}`);
    versions.set(job.job_id, [job.version, slow]);
  }
  changes.length = Math.min(changes.length, 50);
  return changes;
}

function energyParts(found, changes) {
  if (found.error) return [make("p", { class: "note" }, found.error)];
  const rows = found.jobs.map((job) =>
    make("tr", {}, make("td", {}, job.job_id), make("td", {}, stateMark(job.state)), ...cells([job.scheduler, `version ${job.version}`, formatValue(job.iteration_s ?? job.time_s, "s"), formatValue(job.iteration_j ?? job.energy_j, "J"), job.stragglers.length ? `${job.stragglers.length}` : "none", job.note || (job.silent.length ? `silent: rank ${job.silent.join(", ")}` : "-")])),
  );
  const parts = [rows.length ? table(["job", "state", "scheduler", "clocks", "step", "energy", "stragglers", "note"], rows, "jobs of the energy server") : make("p", { class: "note" }, `no jobs at ${found.url}`)];
  if (changes.length) parts.push(make("ul", { class: "events" }, ...changes.map((each) => make("li", {}, each))));
  return parts;
}

function fleetParts(fleet, now) {
  if (fleet.error) return [make("p", { class: "note" }, fleet.error)];
  const servers = fleet.servers.map((server) => {
    const bar = make("div", { class: "use", role: "img", "aria-label": `${server.name}: ${server.gpus_in_use} of ${server.gpus} GPUs in use` });
    for (let at = 0; at < Math.min(server.gpus, 64); at += 1) bar.append(make("i", { class: at < server.gpus_in_use ? "used" : "" }));
    return make("div", { class: "server" }, make("b", {}, server.name), make("span", { class: "note" }, `${server.gpus_in_use} of ${server.gpus} ${server.gpu_type}${server.away ? ` · ${server.away}` : ""}`), bar);
  });
  const rows = [...fleet.jobs].reverse().map((job) =>
    make(
      "tr",
      {},
      make("td", { class: "number" }, String(job.id)),
      make("td", {}, job.name),
      make("td", {}, stateMark(job.state)),
      ...cells([job.note || "-", job.steps ? `${job.step} of ${job.steps}` : job.step, job.places.map((place) => `${place.server}: ${place.gpus.join(", ")}`).join("; ") || "-", OVER.includes(job.state) && job.finished_s ? `ended ${ago(now - job.finished_s)}` : `came ${ago(now - job.submitted_s)}`]),
    ),
  );
  const words = `${fleet.url} · ${fleet.policy} · ${fleet.running} run, ${fleet.waiting} wait${fleet.draining ? " · draining" : ""}${fleet.failure ? ` · ${fleet.failure}` : ""}`;
  return [make("p", {}, words), make("div", { class: "servers" }, ...servers), rows.length ? table(["job", "name", "state", "why", "step", "where", "when"], rows, "jobs of the fleet") : make("p", { class: "note" }, "no jobs yet"), commandElement(fleet.command)];
}
