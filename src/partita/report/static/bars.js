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
  if (share > (window.innerWidth < 620 ? 0.14 : 0.08)) part.append(formatShare(share));
  const lines = [`${owner}: ${name}`, `${formatValue(value, figure.unit)} (${formatShare(share)})`];
  part.addEventListener("pointermove", (event) => page.tip.show(lines, event.clientX, event.clientY));
  part.addEventListener("pointerleave", () => page.tip.hide());
  return part;
}

export function barsElement(figure, page) {
  const shown = figure.bars.slice(0, SHOWN_BARS);
  const keys = figure.parts.map((name, place) => {
    const colour = partColour(name, place);
    const sample = make("i", { class: colour === "idle" ? "swatch idle" : "swatch" });
    if (colour !== "idle") sample.style.background = colour;
    return make("span", { class: "key" }, sample, name);
  });
  const bars = shown.map(({ row: place, count }, at) => {
    const row = figure.table.rows[place];
    const times = count > 1 ? ` ×${count.toLocaleString("en")}` : "";
    const owner = `${row[0]}${times}`;
    const whole = figure.whole[at] || 1;
    const parts = figure.parts.map((name, part) => partElement(figure, name, part, row[part + 1], whole, owner, page));
    const words = figure.parts.map((name, part) => `${name} ${formatValue(row[part + 1], figure.unit)}`).join(", ");
    const total = figure.totals ? make("span", { class: "bar-total" }, formatValue(figure.totals[at], figure.unit)) : null;
    return make(
      "div",
      { class: total ? "bar-row with-total" : "bar-row" },
      make("span", { class: "bar-name", title: owner.slice(0, 200) }, make("span", {}, row[0]), times),
      make("div", { class: "bar", role: "img", "aria-label": `${owner}: ${words}` }, ...parts),
      total,
    );
  });
  const hidden = figure.bars.length - shown.length;
  const rest = hidden > 0 ? make("p", { class: "note" }, `${hidden} more in the table`) : null;
  return make("div", { class: "figure-body" }, make("div", { class: "legend" }, ...keys), make("div", { class: "bar-list" }, ...bars), rest, tableDetails(figure));
}
