// Time against energy of a plan: the frontier, the pipeline by clock, a straggler, the clocks' files.

import { make } from "./report/dom.js";
import { commandElement } from "./report/page.js";
import { documentAddress, get, post } from "./api.js";
import { button, choiceField, formValues, messagePlace, textField } from "./forms.js";
import { withChosen } from "./view_model.js";
import { WorkPanel, documentLinks, showFigures } from "./work.js";

const POINT_WAIT_MS = 300;
const ENERGY_KINDS = ["solution", "frontier"];

// Ask for clocks and wait for them; they are small.
async function clocksOf(values) {
  let job = await post("/jobs", { kind: "clocks", values });
  while (job.state === "waiting" || job.state === "running") {
    await new Promise((resolve) => setTimeout(resolve, 150));
    job = await get(`/jobs/${job.id}`);
  }
  if (job.state !== "done") throw new Error(job.error);
  return job;
}

const LIMITS = ["straggler", "slowdown", "least_energy"];

// Return a place to ask for clocks in; what is asked is in the address, and asked again with it.
function clocksBox(app, frontier, values) {
  const message = messagePlace();
  message.show(null);
  const place = make("div", { role: "status" });
  const show = async (asked) => {
    const kept = Object.entries(app.last.energy).filter(([name]) => !LIMITS.includes(name));
    app.address({ ...Object.fromEntries(kept), ...asked }, true);
    message.show(null);
    document.documentElement.dataset.clocks = "asking";
    try {
      const job = await clocksOf({ frontier: `doc:${frontier.id}`, ...asked, ...(asked.least_energy ? { least_energy: true } : {}) });
      const { lines, command } = job.facts;
      const held = job.documents.clocks;
      place.replaceChildren(
        ...lines.map((line) => make("p", {}, line)),
        make("p", { class: "actions" }, make("a", { class: "file", href: documentAddress(held.id), download: held.name }, `download ${held.title}`)),
        commandElement(command),
      );
      document.documentElement.dataset.clocks = held.id;
    } catch (error) {
      message.show(error);
      document.documentElement.dataset.clocks = "failed";
    }
  };
  const slow = textField("straggler", "A straggler makes a step take (s)", values.straggler, { inputmode: "decimal" });
  const more = textField("slowdown", "Slower by at most (0.02 = 2 %)", values.slowdown, { inputmode: "decimal" });
  const element = make(
    "section",
    { class: "sheet clocks-box", "aria-label": "clocks" },
    make("h2", {}, "Clocks to run with"),
    make("p", { class: "note" }, "Those of the point that the slider above is at, those of least energy, or those that keep a limit."),
    make("p", { class: "actions" }, button("Clocks of the slider's point", () => show({ point: String(app.point) })), button("Clocks of least energy", () => show({ least_energy: "true" }))),
    make("div", { class: "fields" }, make("div", {}, slow.element, button("Clocks for the straggler", () => show({ straggler: slow.input.value.trim() }))), make("div", {}, more.element, button("Clocks for the slowdown", () => show({ slowdown: more.input.value.trim() })))),
    message.element,
    place,
  );
  const asked = LIMITS.find((name) => values[name]);
  if (asked) show({ [asked]: values[asked] });
  return element;
}

export async function energyView(app, values) {
  const held = (await get("/documents")).filter((each) => ENERGY_KINDS.includes(each.kind));
  const plan = choiceField("plan", "Plan or frontier", withChosen(held.length ? held.map((each) => [`doc:${each.id}`, `${each.title}: ${each.about}`]) : [["", "none yet: plan a model first"]], values.plan), values.plan || "");
  plan.element.classList.add("broad");
  const points = textField("points", "Points", values.points || "24", { inputmode: "numeric" });
  const form = make("form", { class: "sheet" }, make("div", { class: "fields" }, plan.element, points.element), make("p", { class: "actions" }, make("button", { type: "submit", class: "main", disabled: !held.length }, "Find the frontier")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    app.go("energy", formValues(form));
  });
  const panel = new WorkPanel(app.page);
  const figures = make("div", { class: "report" });
  const clocks = make("div", {});
  app.root.replaceChildren(make("h1", {}, "Time against energy"), form, panel.element, figures, clocks);
  app.onLeave(() => panel.end());
  if (!values.plan) return;
  const asked = Object.fromEntries(Object.entries(values).filter(([name]) => ["plan", "points"].includes(name)));
  const isFrontier = held.some((each) => `doc:${each.id}` === values.plan && each.kind === "frontier");
  if (isFrontier) delete asked.points;
  const job = await panel.run("frontier", asked);
  if (!job) return;
  app.point = 0;
  let timer = null;
  app.page.bus.on("point", ({ point }) => {
    app.point = point;
    clearTimeout(timer);
    if (clocks.isConnected && point !== Number(app.last.energy.point || 0)) timer = setTimeout(() => app.address({ ...app.last.energy, point }, true), POINT_WAIT_MS);
  });
  app.onLeave(() => clearTimeout(timer));
  await showFigures(figures, job, app.page);
  if (values.point) app.page.bus.emit("turn to point", Number(values.point));
  clocks.append(clocksBox(app, job.documents.frontier, values), documentLinks(job.documents));
}
