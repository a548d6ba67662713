// A time axis that figures share: the part that is seen, and the cursor.

export class Axis {
  constructor(length) {
    this.length = Math.max(length, 1e-12);
    this.from = 0;
    this.to = this.length;
    this.cursor = null;
    this.listeners = [];
  }

  // Make room for a figure that is longer than those before.
  extend(length) {
    if (length <= this.length) return;
    this.length = length;
    this.all();
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  tell() {
    for (const listener of this.listeners) listener();
  }

  show(from, to) {
    const least = this.length * 1e-7;
    const span = Math.min(Math.max(to - from, least), this.length);
    this.from = Math.min(Math.max(from, 0), this.length - span);
    this.to = this.from + span;
    this.tell();
  }

  all() {
    this.show(0, this.length);
  }

  // Zoom by a factor (below 1 = closer) around a time, which stays where it is.
  zoom(factor, at) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(seconds) {
    this.show(this.from + seconds, this.to + seconds);
  }

  point(time) {
    if (this.cursor === time) return;
    this.cursor = time;
    this.tell();
  }
}

// Return round numbers between two, at most so many.
export function roundTicks(from, to, most) {
  const raw = (to - from) / Math.max(1, most);
  if (!(raw > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= raw * (1 - 1e-9));
  const result = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to * (1 + 1e-12); at += 1) result.push(at * step + 0);
  return result;
}

// Return how times are written so that neighbours on an axis differ.
export function tickWords(ticks, unitOf) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : ticks[0] || 1;
  const largest = Math.max(...ticks.map(Math.abs), step);
  const [factor, unit] = unitOf(largest);
  const decimals = Math.max(0, Math.ceil(-Math.log10(step * factor) - 1e-9));
  return ticks.map((tick) => `${(tick * factor).toFixed(Math.min(decimals, 9))}${unit ? ` ${unit}` : ""}`);
}

export function secondsUnit(largest) {
  if (largest >= 1) return [1, "s"];
  return largest >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
}
