// Hosts and devices, each with its stages; types of devices are told apart by a mark.

import { formatValue } from "./format.js";
import { make } from "./dom.js";
import { stageColour } from "./colours.js";
import { tableDetails } from "./table.js";

const MARKS = ["●", "▲", "■", "◆", "★", "▼", "✚", "○"];
const SHOWN_DEVICES = 4096;
const ROOMY = 96;

export function typeMarks(types) {
  const known = [...new Set(types)].filter((type) => type);
  return new Map(known.map((type, at) => [type, known.length > 1 ? MARKS[at % MARKS.length] : ""]));
}

function stageWords(figure, at) {
  if (!figure.planned) return "";
  const stages = figure.stages[at];
  if (!stages.length) return "unused";
  const words = figure.words[at];
  return `stage${stages.length > 1 ? "s" : ""} ${words.length > 40 ? `${words.slice(0, 40)}…` : words}`;
}

// Return the colours of a device's stages as bands; many stages are no colours any more.
function bandsOf(stages) {
  return make("span", { class: "bands", "aria-hidden": "true" }, ...stages.slice(0, 8).map((stage) => {
    const band = make("i", {});
    band.style.background = stageColour(stage);
    return band;
  }));
}

function deviceElement(figure, device, marks, page, small) {
  const stages = figure.stages[device.stages];
  const leaf = device.name.includes("/") ? device.name.slice(device.name.lastIndexOf("/") + 1) : device.name;
  const mark = marks.get(device.type);
  const about = [mark ? `${mark} ${device.type}` : device.type, stageWords(figure, device.stages)];
  const unused = figure.planned && !stages.length;
  const told = small ? [mark ? make("small", { "aria-hidden": "true" }, mark) : null] : [
    make("b", {}, leaf, about[0] ? make("small", {}, about[0]) : null),
    about[1] ? make("span", {}, about[1]) : null,
  ];
  const element = make("div", { class: `device${unused ? " unused" : ""}${small ? " small" : ""}` }, bandsOf(stages), ...told);
  const lines = [device.name, ...about.filter((word) => word)];
  if (device.memory_bytes) lines.push(formatValue(device.memory_bytes, "bytes"));
  element.addEventListener("pointerenter", () => page.bus.emit("device", device.name));
  element.addEventListener("pointermove", (event) => page.tip.show(lines, event.clientX, event.clientY));
  element.addEventListener("pointerleave", () => {
    page.bus.emit("device", null);
    page.tip.hide();
  });
  return element;
}

export function clusterElement(figure, page) {
  const marks = typeMarks(figure.devices.map((device) => device.type));
  const shown = figure.devices.slice(0, SHOWN_DEVICES);
  const small = figure.devices.length > ROOMY;
  const ofHost = figure.hosts.map(() => []);
  for (const device of shown) ofHost[device.host].push(device);
  const hosts = figure.hosts.map((name, host) => {
    const own = ofHost[host];
    if (!own.length) return null;
    return make("div", { class: small ? "host small" : "host" }, make("span", { class: "host-name" }, name), ...own.map((device) => deviceElement(figure, device, marks, page, small)));
  });
  const types = small ? [...marks].filter(([, mark]) => mark).map(([type, mark]) => make("span", { class: "key" }, `${mark} ${type}`)) : [];
  const hidden = figure.devices.length - shown.length;
  const rest = hidden > 0 ? make("p", { class: "note" }, `${hidden} more devices in the table`) : null;
  return make("div", { class: "figure-body" }, types.length ? make("div", { class: "legend" }, ...types) : null, make("div", { class: small ? "hosts small" : "hosts" }, ...hosts), rest, tableDetails(figure));
}
