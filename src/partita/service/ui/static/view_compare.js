// Several plans on one axis: planners on a problem, or plans that the page has.

import { make } from "./report/dom.js";
import { get } from "./api.js";
import { areaField, formValues, messagePlace, textField } from "./forms.js";
import { modelField } from "./view_model.js";
import { WorkPanel, documentLinks, showFigures } from "./work.js";

const USUAL = ["auto", "uniform", "single"];

function boxes(name, entries, chosen) {
  return make("div", { class: "boxes" }, ...entries.map(([value, words]) => make("label", { class: "box" }, make("input", { type: "checkbox", name, value, checked: chosen.includes(value) }), make("span", {}, words))));
}

export async function compareView(app, values) {
  const held = (await get("/documents")).filter((each) => each.kind === "solution");
  const message = messagePlace();
  message.show(null);
  const chosen = [].concat(values.plans || []);
  const ofPlans = make(
    "form",
    { class: "sheet" },
    make("h2", {}, "Plans of this page"),
    held.length < 2 ? make("p", { class: "note" }, "Comparing takes two plans or more: plan a model, or upload plans.") : null,
    held.length ? boxes("plans", held.map((each) => [`doc:${each.id}`, `${each.title}: ${each.about}`]), chosen) : null,
    message.element,
    make("p", { class: "actions" }, make("button", { type: "submit", class: "main", disabled: held.length < 2 }, "Compare")),
  );
  ofPlans.addEventListener("submit", (event) => {
    event.preventDefault();
    const { plans = [] } = formValues(ofPlans);
    if (plans.length < 2) message.show("choose two plans or more");
    else app.go("compare", { plans });
  });
  const model = await modelField(app, values.model);
  const cluster = areaField("cluster", "Cluster", values.cluster || "2x4xa100");
  const microbatches = textField("microbatches", "Microbatches", values.microbatches, { inputmode: "numeric" });
  const seconds = textField("time_limit", "Seconds to search", values.time_limit, { inputmode: "decimal" });
  const planners = [].concat(values.planner || USUAL);
  const ofPlanners = make(
    "form",
    { class: "sheet" },
    make("h2", {}, "Planners on a model"),
    make("div", { class: "fields" }, model.element, cluster.element, microbatches.element, seconds.element),
    boxes("planner", app.choices.planners.map((name) => [name, name]), planners),
    make("p", { class: "actions" }, make("button", { type: "submit", class: "main" }, "Compare planners")),
  );
  ofPlanners.addEventListener("submit", (event) => {
    event.preventDefault();
    app.go("compare", formValues(ofPlanners));
  });
  const asked = chosen.length > 1 || values.model;
  const forms = make("details", { class: "again", open: !asked }, make("summary", {}, "what to compare"), make("div", { class: "two" }, ofPlans, ofPlanners));
  const panel = new WorkPanel(app.page);
  const figures = make("div", { class: "report" });
  const links = make("div", {});
  app.root.replaceChildren(make("h1", {}, "Compare"), forms, panel.element, links, figures);
  app.onLeave(() => panel.end());
  if (!asked) return;
  const job = await panel.run("compare", chosen.length > 1 ? { plans: chosen } : { ...values, planner: planners });
  if (!job) {
    forms.open = true;
    return;
  }
  await showFigures(figures, job, app.page);
  const found = documentLinks(job.documents);
  if (found) links.append(found);
}
