// Forms: labelled fields, choices, messages, files.

import { make } from "./report/dom.js";

let counter = 0;

function labelled(label, input, hint) {
  counter += 1;
  input.id = `field${counter}`;
  const note = hint ? make("span", { class: "field-hint", id: `hint${counter}` }, hint) : null;
  if (note) input.setAttribute("aria-describedby", note.id);
  return make("div", { class: "field" }, make("label", { for: input.id }, label), input, note);
}

export function textField(name, label, value, settings = {}) {
  const { hint, ...rest } = settings;
  const input = make("input", { type: "text", name, value: value ?? "", autocomplete: "off", spellcheck: "false", ...rest });
  return { input, element: labelled(label, input, hint) };
}

export function areaField(name, label, value, settings = {}) {
  const { hint, ...rest } = settings;
  const input = make("textarea", { name, rows: 2, spellcheck: "false", autocomplete: "off", ...rest });
  input.value = value ?? "";
  return { input, element: labelled(label, input, hint) };
}

export function choiceField(name, label, choices, value, settings = {}) {
  const { hint, ...rest } = settings;
  const input = make("select", { name, ...rest }, ...choices.map(([each, words]) => make("option", { value: each, selected: each === value }, words)));
  return { input, element: labelled(label, input, hint) };
}

// Return the values of a form that are not empty; boxes of one name are a list.
export function formValues(form) {
  const found = {};
  for (const input of form.elements) {
    if (!input.name || (input.type === "checkbox" && !input.checked)) continue;
    const value = input.value.trim();
    if (!value) continue;
    if (input.type === "checkbox") found[input.name] = [...(found[input.name] || []), value];
    else found[input.name] = value;
  }
  return found;
}

// Return a place for what is wrong, which screen readers are told at once.
export function messagePlace() {
  const element = make("p", { class: "message", role: "alert" });
  return {
    element,
    show(error) {
      element.textContent = error ? String(error.message || error) : "";
      element.hidden = !error;
    },
  };
}

export function button(words, onclick, settings = {}) {
  return make("button", { type: "button", onclick, ...settings }, words);
}

// Return a place to drop a file on, which a click opens, too.
export function dropZone(words, onfile) {
  const input = make("input", { type: "file", class: "unseen", "aria-label": words });
  const zone = make("label", { class: "drop" }, input, make("span", {}, words));
  input.addEventListener("change", () => {
    if (input.files.length) onfile(input.files[0]);
    input.value = "";
  });
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    if (event.dataTransfer.files.length) onfile(event.dataTransfer.files[0]);
  });
  return zone;
}
