// A plan: searched with live progress, shown, changed by hand, saved.

import { make } from "./report/dom.js";
import { Editor } from "./edit.js";
import { formValues } from "./forms.js";
import { modelField, stepFields } from "./view_model.js";
import { WorkPanel, documentLinks, showFigures } from "./work.js";
import { areaField } from "./forms.js";

function listOf(value) {
  return value === undefined ? [] : [].concat(value);
}

// Return the form that asks for another plan, folded.
async function againForm(app, values) {
  const model = await modelField(app, values.model);
  const cluster = areaField("cluster", "Cluster", values.cluster || "2x4xa100");
  for (const { element } of [model, cluster]) element.classList.add("broad");
  const fields = [model, cluster, ...stepFields(app, values)];
  const form = make("form", { class: "sheet" }, make("div", { class: "fields" }, ...fields.map((field) => field.element)), make("p", { class: "actions" }, make("button", { type: "submit", class: "main" }, "Plan")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    app.go("plan", formValues(form));
  });
  const asked = values.plan || values.model;
  return make("details", { class: "again", open: !asked }, make("summary", {}, asked ? "change what is planned" : "what to plan"), form);
}

export async function planView(app, values) {
  const { edits, ...asked } = values;
  const panel = new WorkPanel(app.page);
  const editing = make("section", { class: "editing" });
  const figures = make("div", { class: "report" });
  const heading = make("h1", {}, "Plan");
  const again = await againForm(app, asked);
  app.root.replaceChildren(heading, panel.element, again, editing, figures);
  app.onLeave(() => panel.end());
  if (!asked.plan && !asked.model) return;
  const job = asked.plan ? await panel.run("show", { plan: asked.plan }) : await panel.run("plan", asked);
  if (!job) {
    again.open = true; // what was asked may be what is wrong
    return;
  }
  const held = job.documents.plan;
  const editor = new Editor(app, held, listOf(edits), (list) => app.address({ ...asked, edits: list }));
  const links = documentLinks(job.documents);
  editing.replaceChildren(...[links, editor.element].filter((part) => part));
  const shown = await showFigures(figures, job, app.page);
  heading.textContent = shown.title;
  figures.querySelector(".figure-title").textContent = "The plan as it was found";
  if (job.facts.remarks) figures.prepend(...job.facts.remarks.map((line) => make("p", { class: "note" }, line)));
  await editor.load();
}
