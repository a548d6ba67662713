// A plan changed by hand: boundaries dragged, stages moved; each change simulated at once.

import { make } from "./report/dom.js";
import { commandElement, figureElement } from "./report/page.js";
import { formatShare, formatValue } from "./report/format.js";
import { inkOn, stageColour } from "./report/colours.js";
import { documentAddress, post } from "./api.js";
import { button, choiceField, messagePlace, textField } from "./forms.js";
import { listeners, release } from "./work.js";

// Put an edit at the end of a list; one that only changes what the last one set takes its place.
export function withEdit(edits, edit) {
  const key = (text) => text.slice(0, text.indexOf("="));
  const last = edits[edits.length - 1];
  return last !== undefined && key(last) === key(edit) && !edit.startsWith("device") ? [...edits.slice(0, -1), edit] : [...edits, edit];
}

// Return how many ops lie before a boundary that is dragged to a share of the bar; both sides keep one.
export function draggedTo(stages, at, share) {
  const total = stages.reduce((sum, stage) => sum + stage.ops, 0);
  const low = (at ? stages[at - 1].end : 0) + 1;
  const high = stages[at + 1].end - 1;
  return Math.min(Math.max(Math.round(share * total), low), Math.max(high, low));
}

export class Editor {
  constructor(app, held, edits, onEdits) {
    this.app = app;
    this.held = held;
    this.edits = edits;
    this.onEdits = onEdits;
    this.bar = make("div", { class: "stages", role: "group", "aria-label": "boundaries between stages" });
    this.facts = make("dl", { class: "facts" });
    this.message = messagePlace();
    this.controls = make("div", { class: "fields edit-fields" });
    this.stageRows = make("div", { class: "stage-rows" });
    this.undo = button("Undo", () => this.set(this.edits.slice(0, -1)));
    this.reset = button("Undo all", () => this.set([]), { class: "quiet" });
    this.save = button("Save as plan", () => this.keep());
    this.saved = make("div", { class: "saved", role: "status" });
    this.figures = make("div", { class: "figures" });
    this.said = make("div", { class: "unseen", role: "status", "aria-live": "polite" });
    this.element = make(
      "section",
      { class: "editor", "aria-label": "change this plan" },
      make("h2", {}, "Change it by hand"),
      make("p", { class: "note" }, "Drag a boundary, or focus it and press the arrow keys (Page Up and Page Down for more ops); each change is simulated at once."),
      this.bar,
      this.facts,
      this.message.element,
      this.controls,
      make("details", { class: "again" }, make("summary", {}, "stages: devices and replicas"), this.stageRows),
      make("p", { class: "actions" }, this.undo, this.reset, this.save),
      this.saved,
      this.figures,
      this.said,
    );
    this.message.show(null);
    this.fill();
  }

  fill() {
    const { choices } = this.app;
    this.schedule = choiceField("schedule", "Schedule", choices.schedules.map((name) => [name, name]), "");
    this.schedule.input.addEventListener("change", () => this.change(`schedule=${this.schedule.input.value}`));
    this.microbatches = textField("microbatches", "Microbatches", "", { inputmode: "numeric" });
    this.microbatches.input.addEventListener("change", () => this.change(`microbatches=${this.microbatches.input.value.trim()}`));
    this.controls.append(this.schedule.element, this.microbatches.element);
  }

  load() {
    return this.ask(this.edits, true);
  }

  change(edit) {
    return this.set(withEdit(this.edits, edit));
  }

  set(edits) {
    return this.ask(edits, false);
  }

  // Ask for a plan; while an answer is under way only the newest wish is kept.
  async ask(edits, first) {
    this.wish = { edits, first };
    if (this.asking) return;
    this.asking = true;
    while (this.wish) {
      const { edits: wanted, first: isFirst } = this.wish;
      this.wish = null;
      document.documentElement.dataset.edit = "asking";
      try {
        const answer = await post("/edit", { plan: this.held.id, edits: wanted });
        this.edits = wanted;
        this.answer = answer;
        this.message.show(answer.refusal ? `does not fit: ${answer.refusal}` : null);
        if (!isFirst) this.onEdits(wanted);
        await this.show();
      } catch (error) {
        this.message.show(error);
        if (this.answer) this.showBar();
      }
    }
    this.asking = false;
    document.documentElement.dataset.edit = `${this.edits.length}`;
  }

  async show() {
    const { answer } = this;
    this.showBar();
    this.showFacts();
    this.showStages();
    this.schedule.input.value = answer.schedule;
    this.microbatches.input.value = answer.microbatches;
    this.undo.disabled = !this.edits.length;
    this.reset.disabled = !this.edits.length;
    this.save.disabled = !this.edits.length || Boolean(answer.refusal);
    this.saved.replaceChildren();
    if (this.edits.length) await this.showFigures();
    else this.figures.replaceChildren();
  }

  showFacts() {
    const { answer } = this;
    const { change } = answer;
    const entries = [
      [formatValue(answer.step_s, "s"), "step"],
      [!this.edits.length ? "as planned" : Math.abs(change) < 5e-4 ? "no change" : formatShare(change, true), `${answer.per}against the plan`],
      [formatShare(answer.busy), "busy"],
      [answer.title, "plan"],
    ];
    if (answer.gap !== null) entries.splice(2, 0, [formatShare(answer.gap), "above the bound, at most"]);
    this.facts.replaceChildren(...entries.map(([value, words]) => make("div", { class: "fact" }, make("dt", {}, words), make("dd", {}, value))));
    if (this.edits.length) this.said.textContent = `step ${entries[0][0]}, ${entries[1].join(" ")}${answer.refusal ? `; does not fit: ${answer.refusal}` : ""}`;
  }

  showBar() {
    const { stages } = this.answer;
    if (this.bar.childElementCount !== 2 * stages.length - 1) this.makeBar(stages);
    const total = this.answer.ops;
    stages.forEach((stage, at) => {
      const { part, label, handle } = this.parts[at];
      part.style.flexGrow = stage.ops / total;
      label.textContent = `${at}: ${stage.ops}`;
      part.title = `stage ${at}: ${stage.ops} ops from ${stage.first}, ${formatValue(stage.seconds, "s")}`;
      if (!handle) return;
      handle.setAttribute("aria-valuenow", stage.end);
      handle.setAttribute("aria-valuemin", (at ? stages[at - 1].end : 0) + 1);
      handle.setAttribute("aria-valuemax", stages[at + 1].end - 1);
      handle.setAttribute("aria-valuetext", `stage ${at} has ${stage.ops} ops, stage ${at + 1} has ${stages[at + 1].ops}`);
    });
  }

  makeBar(stages) {
    this.parts = stages.map((stage, at) => {
      const label = make("span", {});
      const part = make("div", { class: "stage" }, label);
      part.style.background = stageColour(at);
      part.style.color = inkOn(stageColour(at));
      const handle = at + 1 < stages.length ? this.makeHandle(at) : null;
      return { part, label, handle };
    });
    this.bar.replaceChildren(...this.parts.flatMap(({ part, handle }) => (handle ? [part, handle] : [part])));
  }

  makeHandle(at) {
    const handle = make("div", { class: "handle", role: "slider", tabindex: 0, "aria-orientation": "horizontal", "aria-label": `boundary between stages ${at} and ${at + 1}` });
    const move = (count) => {
      const { stages } = this.answer;
      const low = (at ? stages[at - 1].end : 0) + 1;
      const wanted = Math.min(Math.max(count, low), stages[at + 1].end - 1);
      if (wanted !== this.pending(at)) this.change(`cut:${at}=${wanted}`);
    };
    handle.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
      if (!by) return;
      event.preventDefault();
      move(this.pending(at) + by);
    });
    handle.addEventListener("pointerdown", (event) => {
      handle.setPointerCapture(event.pointerId);
      handle.classList.add("held");
      this.before = this.edits;
    });
    handle.addEventListener("pointermove", (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      const box = this.bar.getBoundingClientRect();
      move(draggedTo(this.answer.stages, at, (event.clientX - box.left) / box.width));
    });
    for (const name of ["pointerup", "pointercancel"]) handle.addEventListener(name, () => handle.classList.remove("held"));
    return handle;
  }

  // Return where a boundary is, or will be when what is under way is answered.
  pending(at) {
    const prefix = `cut:${at}=`;
    const last = this.wish ? this.wish.edits[this.wish.edits.length - 1] : "";
    return last && last.startsWith(prefix) ? Number(last.slice(prefix.length)) : this.answer.stages[at].end;
  }

  showStages() {
    const { stages, devices } = this.answer;
    const rows = stages.map((stage, at) => {
      const places = stage.devices.map((group, replica) => {
        if (!stage.movable) return make("span", { class: "note" }, group.join(", "));
        const options = devices.map((device) => make("option", { value: device.name, selected: device.name === group[0] }, `${device.name} (${device.type}${device.used ? "" : ", idle"})`));
        const select = make("select", { "aria-label": `device of stage ${at}${stage.devices.length > 1 ? `, replica ${replica}` : ""}` }, ...options);
        select.addEventListener("change", () => this.change(`device:${at}.${replica}=${select.value}`));
        return select;
      });
      const fewer = button("−", () => this.change(`replicas:${at}=${stage.devices.length - 1}`), { "aria-label": `one replica of stage ${at} fewer`, disabled: stage.devices.length < 2 });
      const more = button("+", () => this.change(`replicas:${at}=${stage.devices.length + 1}`), { "aria-label": `one replica of stage ${at} more` });
      const mark = make("i", { class: "swatch" });
      mark.style.background = stageColour(at);
      return make("div", { class: "stage-row" }, make("b", {}, mark, ` stage ${at}`), make("span", { class: "note" }, `${stage.ops} ops, ${formatValue(stage.seconds, "s")}`), make("span", { class: "replicas" }, fewer, `${stage.devices.length} replica${stage.devices.length > 1 ? "s" : ""}`, more), make("span", { class: "places" }, ...places));
    });
    this.stageRows.replaceChildren(...rows);
  }

  // Draw the step; the figure that is there shows on until the new one is whole.
  async showFigures() {
    const { page } = this.app;
    const { axes } = page;
    const before = axes.get("edit");
    this.kept = this.kept || listeners(page);
    release(page, this.kept);
    axes.delete("edit");
    const drawn = this.answer.figures.map((figure) => figureElement({ ...figure, axis: "edit" }, page));
    this.figures.replaceChildren(...drawn.map(({ element }) => element));
    await Promise.all(drawn.map(({ done }) => done));
    // Whoever has looked closer goes on looking there.
    if (before && before.to - before.from < before.length) axes.get("edit").show(before.from, before.to);
  }

  async keep() {
    try {
      const held = await post("/edit/save", { plan: this.held.id, edits: this.edits });
      this.saved.replaceChildren(
        make("p", { class: "actions" }, "saved: ", make("a", { class: "file", href: documentAddress(held.id), download: held.name }, `download ${held.title}`), button("Compare with the plan", () => this.app.go("compare", { plans: [`doc:${this.held.id}`, `doc:${held.id}`] })), button("Energy", () => this.app.go("energy", { plan: `doc:${held.id}` }))),
        commandElement(held.command),
      );
      document.documentElement.dataset.saved = held.id;
    } catch (error) {
      this.message.show(error);
    }
  }
}
