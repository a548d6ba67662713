// Tables: every figure can be read as one, and saved as CSV.

import { formatValue } from "./format.js";
import { download, make } from "./dom.js";

const SHOWN_ROWS = 200;

// Return a table; of a very long one the first rows, with a button that shows more.
export function tableElement(table, caption) {
  const numeric = table.columns.map((_, at) => table.rows.some((row) => typeof row[at] === "number"));
  const cell = (value, at) => make("td", { class: numeric[at] ? "number" : "" }, formatValue(value, table.columns[at].unit));
  const head = table.columns.map((column, at) => make("th", { scope: "col", class: numeric[at] ? "number" : "" }, column.title));
  const body = make("tbody", {});
  let shown = 0;
  const more = () => {
    const next = table.rows.slice(shown, shown + SHOWN_ROWS);
    body.append(...next.map((row) => make("tr", {}, ...row.map(cell))));
    shown += next.length;
  };
  more();
  const element = make("table", {}, make("caption", { class: caption.hidden ? "unseen" : "" }, caption.text), make("thead", {}, make("tr", {}, ...head)), body);
  const holder = make("div", { class: "table-holder" }, element);
  if (shown < table.rows.length) {
    const button = make("button", { type: "button" }, `show more of ${table.rows.length.toLocaleString("en")} rows`);
    button.addEventListener("click", () => {
      more();
      if (shown >= table.rows.length) button.remove();
    });
    holder.append(button);
  }
  return holder;
}

function quoted(value) {
  if (value === null || value === undefined) return "";
  let text = String(value);
  // A spreadsheet would take such a text for a formula.
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csvOf(columns, rows) {
  const head = columns.map((column) => quoted(column.unit ? `${column.title} (${column.unit})` : column.title));
  const lines = [head.join(",")];
  for (const row of rows) lines.push(row.map(quoted).join(","));
  return `${lines.join("\r\n")}\r\n`;
}

function fileName(title) {
  return `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure"}.csv`;
}

// Return the points of a chart as rows of its table.
function pointRows(figure) {
  return figure.curves.flatMap((curve) => curve.x.map((x, at) => [curve.name, x, curve.y[at]]));
}

// Return what stands below a figure: its table, folded, and the button for its CSV.
export function tableDetails(figure, rowsOf) {
  const table = () => (figure.curves && !figure.table.rows.length ? { ...figure.table, rows: pointRows(figure) } : figure.table);
  const save = make("button", { type: "button", class: "quiet" }, "CSV");
  save.setAttribute("aria-label", `${figure.title}: save as CSV`);
  save.addEventListener("click", () => {
    const full = rowsOf ? rowsOf() : table();
    download(fileName(figure.title), csvOf(full.columns, full.rows), "text/csv");
  });
  const details = make("details", { class: "as-table" }, make("summary", {}, "as a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(tableElement(table(), { text: figure.title, hidden: true }));
  });
  return make("div", { class: "below" }, details, save);
}
