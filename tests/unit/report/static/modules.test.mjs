// The modules that draw figures, by node's own test runner; test_modules.py runs this file.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

const at = (name) => new URL(name, `file://${process.env.PARTITA_STATIC}/`).href;
const { formatOf, formatValue, exactSeconds, withUnits } = await import(at("format.js"));
const { Axis, roundTicks, tickWords, secondsUnit } = await import(at("axis.js"));
const { clockColour, inkOn, kindColour, lineColour, rgb, stageColour, KIND_WORDS } = await import(at("colours.js"));
const { unpack } = await import(at("store.js"));
const { csvOf } = await import(at("table.js"));
const { TrackRows, writeStrip } = await import(at("lanes.js"));

const given = JSON.parse(process.env.PARTITA_GIVEN);

test("numbers are written as the command line writes them", () => {
  for (const [value, unit, words] of given.words) assert.equal(formatValue(value, unit), words);
  assert.equal(formatValue(null, "s"), "-");
  assert.equal(formatValue(1183.14, "kWh"), "1,183 kWh");
  assert.equal(exactSeconds(1.23456789), "1.234568 s");
  assert.equal(formatOf(11.6e9, 77.3e9), "11.6 of 77.3 GB");
  assert.equal(formatOf(655e6, 77.3e9), "655 MB of 77.3 GB");
});

test("a number and its unit stay on one line, and words are left alone", () => {
  assert.equal(withUnits("6.94 s of 12 % on 8 hosts, 3 GB/s"), "6.94\u00a0s of 12\u00a0% on 8 hosts, 3 GB/s");
});

test("an axis never leaves its length, and zooms around a time that stays", () => {
  const axis = new Axis(10);
  axis.zoom(0.5, 2);
  assert.deepEqual([axis.from, axis.to], [1, 6]);
  axis.pan(100);
  assert.deepEqual([axis.from, axis.to], [5, 10]);
  axis.zoom(100, 7);
  assert.deepEqual([axis.from, axis.to], [0, 10]);
});

test("ticks are round, and neighbours differ in words", () => {
  assert.deepEqual(roundTicks(0, 1, 5), [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1]);
  const words = tickWords(roundTicks(6.95, 6.96, 5), secondsUnit);
  assert.equal(new Set(words).size, words.length);
});

const linear = (colour) => rgb(colour).map((value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4));

function contrast(one, two) {
  const light = (colour) => linear(colour).reduce((sum, value, part) => sum + value * [0.2126, 0.7152, 0.0722][part], 0.05);
  const [least, most] = [light(one), light(two)].sort((a, b) => a - b);
  return most / least;
}

const places = Array.from({ length: 12 }, (_, place) => place);
const PALETTES = { kinds: Object.keys(KIND_WORDS).map(kindColour), stages: places.map(stageColour), lines: places.map(lineColour) };

test("numbers on bars are read on any colour", () => {
  const scale = Array.from({ length: 21 }, (_, part) => clockColour(part / 20));
  for (const colour of [...scale, ...Object.values(PALETTES).flat()]) assert.ok(contrast(colour, inkOn(colour)) >= 4.5, colour);
});

const css = await readFile(new URL("style.css", `file://${process.env.PARTITA_STATIC}/`), "utf8");

function themes() {
  const colours = (block) => Object.fromEntries([...block.matchAll(/--(\w+): (#\w{6})/g)].map(([, name, colour]) => [name, colour]));
  const [light] = css.match(/:root \{[^}]*\}/);
  const [dark] = css.match(/:root\[data-theme="dark"\] \{[^}]*\}/);
  return [colours(light), colours(dark)];
}

test("texts and bars keep the contrast of WCAG AA in light and dark", () => {
  for (const theme of themes()) {
    for (const ground of ["paper", "card", "field", "lane"]) {
      for (const text of ["ink", "soft"]) assert.ok(contrast(theme[text], theme[ground]) >= 4.5, `${text} on ${ground}`);
      for (const text of ["accent", "alarm"]) assert.ok(contrast(theme[text], theme[ground]) >= 3, `${text} on ${ground}`);
    }
    assert.ok(contrast(theme.ink, theme.idle) >= 4.5);
    for (const [name, colours] of Object.entries(PALETTES)) {
      for (const colour of colours) assert.ok(contrast(colour, theme.paper) >= 2.95, `${name}: ${colour} on ${theme.paper}`);
    }
  }
});

// Who sees two kinds of cones alone, after Machado, Oliveira and Fernandes (2009).
const SEEN = {
  all: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

// Return how far two colours are apart in OKLab, in hundredths, for the eyes that see least of it.
function apart(one, two) {
  const times = (rows, values) => rows.map((row) => row.reduce((sum, each, at) => sum + each * values[at], 0));
  const toCones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]];
  const toLab = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099], [0.0259040371, 0.7827717662, -0.808675766]];
  const lab = (seen, colour) => times(toLab, times(toCones, times(seen, linear(colour)).map((value) => Math.min(Math.max(value, 0), 1))).map(Math.cbrt));
  return Math.min(...Object.values(SEEN).map((seen) => 100 * Math.hypot(...lab(seen, one).map((value, at) => value - lab(seen, two)[at]))));
}

test("colours that stand side by side are told apart by people who see fewer of them", () => {
  const passes = ["forward", "backward", "backward_weight", "recompute"];
  for (const one of passes) for (const two of passes) if (one < two) assert.ok(apart(kindColour(one), kindColour(two)) >= 7, `${one}, ${two}`);
  for (const place of places) assert.ok(apart(stageColour(place), stageColour(place + 1)) >= 7, `stages ${place} and ${place + 1}`);
  for (const one of [0, 1, 2]) for (const two of [1, 2, 3]) if (one < two) assert.ok(apart(lineColour(one), lineColour(two)) >= 7, `lines ${one}, ${two}`);
});

test("packed columns come out as Python put them in", async () => {
  const { packed, columns } = given;
  const found = await unpack(packed);
  for (const [name, values] of Object.entries(columns)) assert.deepEqual([...found[name]], values);
  await assert.rejects(unpack({ ...packed, version: 2 }), /version 2/);
});

test("a text of a table is no formula of a spreadsheet", () => {
  const text = csvOf([{ title: "name", unit: "" }, { title: "time", unit: "s" }], [["=cmd()", -1], ['a,"b"', null]]);
  assert.equal(text, 'name,time (s)\r\n\'=cmd(),-1\r\n"a,""b""",\r\n');
});

const figure = { kinds: ["forward", "send", "recv"], last_compute: 0, devices: [{ name: "a" }] };

function track(starts, lengths) {
  const rows = starts.length;
  const columns = { device: new Uint32Array(rows), kind: new Uint32Array(rows), start: Uint32Array.from(starts), length: Uint32Array.from(lengths) };
  const found = new TrackRows({ tick_s: 1 }, columns, figure);
  found.colour([{ rgb: [255, 0, 0] }], () => 0);
  return found;
}

test("a pixel shows the share of it that is busy", () => {
  const found = track([0, 4], [2, 1]);
  const pixels = new Uint8ClampedArray(4 * 4);
  writeStrip(found, found.lanes[0], { from: 0, to: 8 }, pixels, 0, 4, [0, 0, 0]);
  assert.deepEqual([pixels[0], pixels[4], pixels[8], pixels[12]], [255, 0, 128, 0]);
});

test("what is under a time is found, and idle time is none", () => {
  const found = track([0, 4], [2, 1]);
  assert.equal(found.computeAt(found.lanes[0], 1), 0);
  assert.equal(found.computeAt(found.lanes[0], 3), -1);
  assert.equal(found.computeAt(found.lanes[0], 4.5), 1);
});
