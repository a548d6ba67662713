// Numbers for people, as units.py writes them: three significant digits, four from 1000 on.

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"]];
const BYTES = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
const JOULES = [[1e9, "GJ"], [1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "uJ"]];

function decimals(value) {
  return Math.max(0, 2 - Math.floor(Math.log10(Math.max(1, Math.abs(value)))));
}

function scaled(value, factor, unit, more) {
  return `${(value / factor).toFixed(decimals(value / factor) + more)} ${unit}`;
}

// Return a number with so many significant digits and no zeros behind them.
function significant(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export function formatSeconds(value) {
  if (Math.abs(value) >= 36000) return Math.abs(value) < 1e9 ? scaled(value, 3600, "h", 0) : `${Number(value.toPrecision(3)).toExponential()} s`;
  const step = SECONDS.find(([least]) => Math.abs(value) >= least);
  if (step) return scaled(value, ...step, 0);
  return value === 0 ? "0 s" : `${significant(value / 1e-9, 3)} ns`;
}

export function formatBytes(value) {
  const step = BYTES.find(([least]) => Math.abs(value) >= least);
  return step ? scaled(value, ...step, 0) : `${value.toFixed(value % 1 ? decimals(value) : 0)} B`;
}

export function formatJoules(value) {
  return scaled(value, ...(JOULES.find(([least]) => Math.abs(value) >= least) || [1, "J"]), 1);
}

export function formatShare(value, sign) {
  const text = `${(value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %`;
  return sign && value >= 0 ? `+${text}` : text;
}

// Return a value of a table as text; null is what is not known.
export function formatValue(value, unit) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (unit === "s") return formatSeconds(value);
  if (unit === "bytes") return formatBytes(value);
  if (unit === "J") return formatJoules(value);
  if (unit === "share") return formatShare(value, false);
  if (unit === "change") return formatShare(value, true);
  const whole = Number.isInteger(value) || Math.abs(value) >= 1000;
  const text = whole ? Math.round(value).toLocaleString("en") : unit ? value.toPrecision(4) : significant(value, 4);
  return unit ? `${text} ${unit}` : text;
}

// Return two sizes whose units say enough: "11.6 of 77.3 GB".
export function formatOf(part, whole) {
  const [one, two] = [formatBytes(part), formatBytes(whole)];
  const [number, unit] = one.split(" ");
  return two.endsWith(` ${unit}`) ? `${number} of ${two}` : `${one} of ${two}`;
}

// Return a text whose numbers are not cut from their units at the end of a line.
export function withUnits(text) {
  return text.replace(/(\d) (?=(?:%|[mun]?s|h|[kMGTP]?B|[mkMG]?J|MHz)(?![\w/]))/g, "$1\u00a0");
}

// Return seconds so exactly that two instructions can be told apart.
export function exactSeconds(value) {
  const size = Math.abs(value);
  const [factor, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  return `${Number((value * factor).toPrecision(7))} ${unit}`;
}
