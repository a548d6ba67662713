// Model and cluster: examples filled in, files dropped, the cluster drawn while it is typed.

import { make } from "./report/dom.js";
import { figureElement } from "./report/page.js";
import { get, post } from "./api.js";
import { areaField, button, choiceField, dropZone, formValues, messagePlace, textField } from "./forms.js";

const CLUSTERS = ["4xa100", "2x4xa100", "2x4xa100+4xv100", "6xa40+2xh100", "8xdgx-h100"];
const MODEL_KINDS = ["graph", "problem", "solution", "config"];
const CLUSTER_WAIT_MS = 120;

// Return what a field offers, with what its address names: that is never another thing without a word.
export function withChosen(choices, value) {
  if (!value || choices.some(([each]) => each === value)) return choices;
  return [...choices, [value, value.startsWith("doc:") ? "a document that is not held here any more" : value]];
}

// Return a field for a model: built-in names, large ones by shape, and documents that hold one.
export async function modelField(app, value) {
  const held = (await get("/documents")).filter((each) => MODEL_KINDS.includes(each.kind));
  const { models, large } = app.choices;
  const choices = [...models.map((name) => [name, name]), ...large.map((name) => [name, `${name} (by its shape)`]), ...held.map((each) => [`doc:${each.id}`, `${each.title} (${each.kind})`])];
  return choiceField("model", "Model", withChosen(choices, value), value || "gpt-small");
}

// Return fields for what is asked of a step and of the planner.
export function stepFields(app, values) {
  const none = ["", "as usual"];
  return [
    textField("microbatches", "Microbatches", values.microbatches, { inputmode: "numeric" }),
    textField("batch_size", "Samples in a step", values.batch_size, { inputmode: "numeric" }),
    choiceField("schedule", "Schedule", [none, ...app.choices.schedules.map((name) => [name, name])], values.schedule || ""),
    choiceField("planner", "Planner", [none, ...app.choices.planners.map((name) => [name, name])], values.planner || ""),
    textField("time_limit", "Seconds to search", values.time_limit, { inputmode: "decimal" }),
    choiceField("objective", "Objective", [none, ...["throughput", "latency", "energy", "cost"].map((name) => [name, name])], values.objective || ""),
  ];
}

export async function uploaded(file, limit) {
  if (file.size > limit) throw new Error(`${file.name} has ${file.size.toLocaleString("en")} bytes; the page takes ${limit.toLocaleString("en")}`);
  return post("/documents", { name: file.name, text: await file.text() });
}

export async function modelView(app, values) {
  const message = messagePlace();
  message.show(null);
  const model = await modelField(app, values.model);
  const cluster = areaField("cluster", "Cluster", values.cluster || "2x4xa100", { hint: "HOSTSxGPUSxTYPE, parts joined by +; or the text of a cluster file" });
  const fields = stepFields(app, values);
  const drawn = make("div", { class: "cluster-place", "aria-live": "polite" });
  const about = make("p", { class: "note", role: "status" });
  const examples = CLUSTERS.map((text) => button(text, () => {
    cluster.input.value = text;
    changed();
  }, { class: "quiet" }));

  async function take(file) {
    message.show(null);
    about.textContent = `reading ${file.name} …`;
    try {
      const held = await uploaded(file, app.choices.limits.upload_bytes);
      if (!form.isConnected) return; // another view is shown meanwhile
      about.textContent = held.about;
      if (held.kind === "cluster") {
        cluster.input.value = `doc:${held.id}`;
        await changed();
      } else if (MODEL_KINDS.includes(held.kind)) {
        const value = `doc:${held.id}`;
        if (![...model.input.options].some((option) => option.value === value)) model.input.append(make("option", { value }, `${held.title} (${held.kind})`));
        model.input.value = value;
        await changed();
        if (held.kind === "solution") app.go("plan", { plan: value });
      } else if (held.kind === "frontier") app.go("energy", { plan: `doc:${held.id}` });
      else if (held.kind === "trace") app.go("fleet", { trace: `doc:${held.id}` });
      document.documentElement.dataset.uploaded = held.id;
    } catch (error) {
      about.textContent = "";
      message.show(error);
    }
  }

  let turn = 0;
  async function draw() {
    const text = cluster.input.value.trim();
    turn += 1;
    const own = turn;
    if (!text) {
      drawn.replaceChildren();
      return;
    }
    try {
      const found = await post("/cluster", { text });
      if (own !== turn) return;
      const { element, done } = figureElement({ ...found.figure, title: found.line }, app.page);
      drawn.replaceChildren(element);
      await done;
      cluster.input.removeAttribute("aria-invalid");
    } catch (error) {
      if (own !== turn) return;
      cluster.input.setAttribute("aria-invalid", "true");
      drawn.replaceChildren(make("p", { class: "message quiet-message" }, error.message));
    }
  }

  // What is chosen is in the address, and the cluster is drawn.
  async function changed() {
    if (!form.isConnected) return;
    app.address(formValues(form), true);
    await draw();
  }

  let timer = null;
  cluster.input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(changed, CLUSTER_WAIT_MS);
  });
  const form = make(
    "form",
    { class: "sheet" },
    make("div", { class: "fields two" }, make("div", {}, model.element, dropZone("drop a graph, a config.json, a plan or a cluster file, or choose one", take), about), make("div", {}, cluster.element, make("p", { class: "examples" }, ...examples))),
    drawn,
    make("div", { class: "fields" }, ...fields.map((field) => field.element)),
    message.element,
    make("p", { class: "actions" }, make("button", { type: "submit", class: "main" }, "Plan"), button("Compare planners", () => app.go("compare", formValues(form)))),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    app.go("plan", formValues(form));
  });
  form.addEventListener("change", () => app.address(formValues(form), true));
  app.root.replaceChildren(make("h1", {}, "Model and cluster"), form);
  await draw();
}
