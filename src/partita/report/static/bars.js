// Bars divided into parts: where time and memory of each device go.

import { formatShare, formatValue } from "./format.js";
import { make } from "./dom.js";
import { inkOn, partColour } from "./colours.js";
import { tableDetails } from "./table.js";

const SHOWN_BARS = 64;

function partElement(figure, name, place, value, whole, owner, page) {
  const share = whole > 0 ? value / whole : 0;
  const colour = partColour(name, place);
  const part = make("div", { class: colour === "idle" ? "part idle" : "part" });
  part.style.width = `${(Math.max(share, 0) * 100).toFixed(3)}%`;
  if (colour !== "idle") {
    part.style.background = colour;
    part.style.color = inkOn(colour);
  }
  if (share > 0.07) part.append(formatShare(share));
  const lines = [`${owner}: ${name}`, `${formatValue(value, figure.unit)} (${formatShare(share)})`];
  part.addEventListener("pointermove", (event) => page.tip.show(lines, event.clientX, event.clientY));
  part.addEventListener("pointerleave", () => page.tip.hide());
  return part;
}

export function barsElement(figure, page) {
  const rows = figure.table.rows.slice(0, SHOWN_BARS);
  const keys = figure.parts.map((name, place) => {
    const colour = partColour(name, place);
    const sample = make("i", { class: colour === "idle" ? "swatch idle" : "swatch" });
    if (colour !== "idle") sample.style.background = colour;
    return make("span", { class: "key" }, sample, name);
  });
  const bars = rows.map((row, at) => {
    const whole = figure.whole[at] || 1;
    const parts = figure.parts.map((name, place) => partElement(figure, name, place, row[place + 1], whole, row[0], page));
    const words = figure.parts.map((name, place) => `${name} ${formatValue(row[place + 1], figure.unit)}`).join(", ");
    return make(
      "div",
      { class: "bar-row" },
      make("span", { class: "bar-name", title: row[0].slice(0, 200) }, row[0]),
      make("div", { class: "bar", role: "img", "aria-label": `${row[0]}: ${words}` }, ...parts),
    );
  });
  const hidden = figure.table.rows.length - rows.length;
  const rest = hidden > 0 ? make("p", { class: "note" }, `${hidden} more in the table`) : null;
  return make("div", { class: "figure-body" }, make("div", { class: "legend" }, ...keys), make("div", { class: "bar-list" }, ...bars), rest, tableDetails(figure));
}
