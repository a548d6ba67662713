// Policies of a shared cluster side by side: jobs played under each.

import { make } from "./report/dom.js";
import { get } from "./api.js";
import { choiceField, formValues, messagePlace, textField } from "./forms.js";
import { WorkPanel, documentLinks, showFigures } from "./work.js";

const USUAL = ["fifo:fair", "fifo:tune", "srtf:joint"];

export async function fleetView(app, values) {
  const traces = (await get("/documents")).filter((each) => each.kind === "trace");
  const message = messagePlace();
  message.show(null);
  const trace = choiceField("trace", "Jobs", [["", "generated"], ...traces.map((each) => [`doc:${each.id}`, each.title])], values.trace || "");
  const number = textField("number", "Number of generated jobs", values.number || "100", { inputmode: "numeric" });
  const load = textField("load", "Generated jobs per hour", values.load || "9", { inputmode: "decimal" });
  const seed = textField("seed", "Seed", values.seed || "1", { inputmode: "numeric" });
  const cluster = textField("cluster", "Servers", values.cluster || "16x8xv100");
  const loads = textField("loads", "Loads to compare (jobs per hour)", values.loads, { hint: "4, or 1,2,4; empty = as they arrive" });
  const chosen = [].concat(values.policy || USUAL);
  const rows = app.choices.orderings.map((ordering) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, ordering),
      ...app.choices.allocators.map((allocator) => {
        const value = `${ordering}:${allocator}`;
        return make("td", {}, make("input", { type: "checkbox", name: "policy", value, checked: chosen.includes(value), "aria-label": value }));
      }),
    ),
  );
  const policies = make("table", { class: "policies" }, make("caption", {}, "Policies: ordering by allocator"), make("thead", {}, make("tr", {}, make("td", {}), ...app.choices.allocators.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
  const form = make(
    "form",
    { class: "sheet" },
    make("div", { class: "fields" }, trace.element, number.element, load.element, seed.element, cluster.element, loads.element),
    make("div", { class: "table-holder" }, policies),
    message.element,
    make("p", { class: "actions" }, make("button", { type: "submit", class: "main" }, "Simulate")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const found = formValues(form);
    if (!found.policy) message.show("choose a policy or more");
    else app.go("fleet", found);
  });
  const asked = Boolean(values.policy);
  const panel = new WorkPanel(app.page);
  const figures = make("div", { class: "report" });
  const links = make("div", {});
  const again = make("details", { class: "again", open: !asked }, make("summary", {}, "jobs, servers and policies"), form);
  app.root.replaceChildren(make("h1", {}, "Fleet"), again, panel.element, links, figures);
  app.onLeave(() => panel.end());
  if (!asked) return;
  const { number: jobs = "100", load: rate = "9", ...rest } = values;
  const generated = `generated:jobs=${jobs},load=${rate}`;
  const job = await panel.run("fleet", { ...rest, policy: chosen, trace: values.trace || generated });
  if (!job) {
    again.open = true;
    return;
  }
  await showFigures(figures, job, app.page);
  const found = documentLinks(job.documents);
  if (found) links.append(found);
}
