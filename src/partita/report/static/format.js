// Numbers for people: the units of the tables, as the command line writes them.

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
}

function plainNumber(value, most) {
  return String(Number(value.toFixed(most === undefined ? digits(value) : most)));
}

function scaled(value, steps) {
  const size = Math.abs(value);
  const step = steps.find(([least]) => size >= least) || steps[steps.length - 1];
  return `${plainNumber(value / step[0])} ${step[1]}`;
}

const SECONDS = [[86400 * 2, "days"], [7200, "h"], [1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const BYTES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const JOULES = [[1e9, "GJ"], [1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"]];

export function formatSeconds(value) {
  if (value === 0) return "0 s";
  const days = Math.abs(value) >= SECONDS[0][0];
  return days ? `${plainNumber(value / 86400)} days` : scaled(value, Math.abs(value) >= 7200 ? [[3600, "h"]] : SECONDS.slice(2));
}

export function formatShare(value, sign) {
  const percent = value * 100;
  const text = Math.abs(percent) >= 10 ? percent.toFixed(0) : percent.toFixed(1);
  return `${sign && percent > 0 ? "+" : ""}${text} %`;
}

// Return a value of a table as text; null is what is not known.
export function formatValue(value, unit) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (unit === "s") return formatSeconds(value);
  if (unit === "bytes") return value === 0 ? "0 B" : scaled(value, BYTES);
  if (unit === "J") return value === 0 ? "0 J" : scaled(value, JOULES);
  if (unit === "share") return formatShare(value, false);
  if (unit === "change") return formatShare(value, true);
  const text = Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  return unit ? `${text} ${unit}` : text;
}

// Return seconds so exactly that two instructions can be told apart.
export function exactSeconds(value) {
  const size = Math.abs(value);
  const [factor, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return `${Number((value * factor).toPrecision(7))} ${unit}`;
}
