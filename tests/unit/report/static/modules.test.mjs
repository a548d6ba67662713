// The modules that draw figures, by node's own test runner; test_modules.py runs this file.

import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(name, `file://${process.env.PARTITA_STATIC}/`).href;
const { formatSeconds, formatShare, formatValue, exactSeconds } = await import(at("format.js"));
const { Axis, roundTicks, tickWords, secondsUnit } = await import(at("axis.js"));
const { clockColour, inkOn, rgb } = await import(at("colours.js"));
const { unpack } = await import(at("store.js"));
const { csvOf } = await import(at("table.js"));
const { TrackRows, writeStrip } = await import(at("lanes.js"));

test("numbers are written as the command line writes them", () => {
  assert.equal(formatSeconds(13.4), "13.4 s");
  assert.equal(formatSeconds(0.0123), "12.3 ms");
  assert.equal(formatValue(26.9e9, "bytes"), "26.9 GB");
  assert.equal(formatValue(null, "s"), "-");
  assert.equal(formatShare(0.5, true), "+50 %");
  assert.equal(exactSeconds(1.23456789), "1.234568 s");
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

test("numbers on bars are read on any colour of the scale", () => {
  const light = (colour) => {
    const [r, g, b] = rgb(colour).map((value) => ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (let share = 0; share <= 1; share += 0.05) {
    const colour = clockColour(share);
    const [one, two] = [light(colour), light(inkOn(colour))].sort((a, b) => b - a);
    assert.ok((one + 0.05) / (two + 0.05) >= 4.5, colour);
  }
});

test("packed columns come out as Python put them in", async () => {
  const { packed, columns } = JSON.parse(process.env.PARTITA_PACKED);
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
