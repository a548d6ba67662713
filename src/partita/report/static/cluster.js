// Hosts and devices, each with its stages; types of devices are told apart by a mark.

import { formatValue } from "./format.js";
import { make } from "./dom.js";
import { stageColour } from "./colours.js";
import { tableDetails } from "./table.js";

const MARKS = ["●", "▲", "■", "◆", "★", "▼", "✚", "○"];
const SHOWN_DEVICES = 256;

export function typeMarks(types) {
  const known = [...new Set(types)].filter((type) => type);
  return new Map(known.map((type, at) => [type, known.length > 1 ? MARKS[at % MARKS.length] : ""]));
}

function stageWords(figure, stages) {
  if (!figure.planned) return "";
  if (!stages.length) return "unused";
  const runs = [];
  for (const stage of stages) {
    const last = runs[runs.length - 1];
    if (last && last[1] === stage - 1) last[1] = stage;
    else runs.push([stage, stage]);
  }
  const words = runs.slice(0, 3).map(([from, to]) => (from === to ? `${from}` : `${from} to ${to}`));
  return `stage${stages.length > 1 ? "s" : ""} ${words.join(", ")}${runs.length > 3 ? ", …" : ""}`;
}

function deviceElement(figure, device, marks, page) {
  const leaf = device.name.includes("/") ? device.name.slice(device.name.lastIndexOf("/") + 1) : device.name;
  const mark = marks.get(device.type);
  const about = [mark ? `${mark} ${device.type}` : device.type, stageWords(figure, device.stages)];
  const bands = device.stages.slice(0, 8).map((stage) => {
    const band = make("i", {});
    band.style.background = stageColour(stage);
    return band;
  });
  const unused = figure.planned && !device.stages.length;
  const element = make(
    "div",
    { class: unused ? "device unused" : "device" },
    make("span", { class: "bands", "aria-hidden": "true" }, ...bands),
    make("b", {}, leaf),
    make("span", {}, about.filter((word) => word).join(" · ")),
  );
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
  const hosts = figure.hosts.map((name, host) => {
    const own = shown.filter((device) => device.host === host);
    if (!own.length) return null;
    return make("div", { class: "host" }, make("span", { class: "host-name" }, name), ...own.map((device) => deviceElement(figure, device, marks, page)));
  });
  const hidden = figure.devices.length - shown.length;
  const rest = hidden > 0 ? make("p", { class: "note" }, `${hidden} more devices in the table`) : null;
  return make("div", { class: "figure-body" }, make("div", { class: "hosts" }, ...hosts), rest, tableDetails(figure));
}
