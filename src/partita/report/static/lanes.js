// Rows of a timeline by lane: what stands where, its mean colour per pixel, what is under a point.

// Rows of one device: compute, which never overlaps; what it sends and shares; what it waits for.
export class Lane {
  constructor(track, compute, out, waits) {
    this.track = track;
    this.compute = compute;
    this.out = out;
    this.waits = waits;
  }
}

// A track in seconds, its rows by device in the order of the figure.
export class TrackRows {
  constructor(about, columns, figure) {
    this.about = about;
    this.figure = figure;
    Object.assign(this, columns);
    this.rows = columns.device.length;
    this.setTimes(columns.start, columns.length, about.tick_s);
    this.lanes = this.cutLanes(figure.devices.length);
  }

  // Return the stages that a lane computes, by number.
  stagesOf(lane) {
    const found = new Set();
    for (let row = lane.compute[0]; row < lane.compute[1]; row += 1) if (this.stage[row] >= 0) found.add(this.stage[row]);
    return [...found].sort((one, two) => one - two);
  }

  setTimes(start, length, tick) {
    this.from = new Float64Array(this.rows);
    this.to = new Float64Array(this.rows);
    for (let row = 0; row < this.rows; row += 1) {
      this.from[row] = start[row] * tick;
      this.to[row] = (start[row] + length[row]) * tick;
    }
    this.sums = null;
  }

  cutLanes(devices) {
    const recv = this.figure.kinds.indexOf("recv");
    const sortOf = (row) => (this.kind[row] <= this.figure.last_compute ? 0 : this.kind[row] === recv ? 2 : 1);
    const lanes = Array.from({ length: devices }, () => new Lane(this, [0, 0], [0, 0], [0, 0]));
    let row = 0;
    while (row < this.rows) {
      const [device, sort, begin] = [this.device[row], sortOf(row), row];
      while (row < this.rows && this.device[row] === device && sortOf(row) === sort) row += 1;
      lanes[device][["compute", "out", "waits"][sort]] = [begin, row];
    }
    return lanes;
  }

  // Sum lengths and colours along each lane, so that the mean of any stretch is two look-ups.
  colour(palette, colourOf) {
    this.palette = palette;
    this.colourOf = new Uint16Array(this.rows);
    const sums = [0, 1, 2, 3].map(() => new Float64Array(this.rows + 1));
    const [whole, red, green, blue] = sums;
    for (let row = 0; row < this.rows; row += 1) {
      const colour = colourOf(row);
      this.colourOf[row] = colour;
      const [r, g, b] = palette[colour].rgb;
      const length = this.to[row] - this.from[row];
      whole[row + 1] = whole[row] + length;
      red[row + 1] = red[row] + length * r;
      green[row + 1] = green[row] + length * g;
      blue[row + 1] = blue[row] + length * b;
    }
    this.sums = sums;
  }

  // Return the first row from `begin` to `end` whose end lies behind a time.
  firstAfter(time, begin, end) {
    let [low, high] = [begin, end];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.to[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Return the compute row of a lane at a time; -1 = it is idle there.
  computeAt(lane, time) {
    const row = this.firstAfter(time, ...lane.compute);
    return row < lane.compute[1] && this.from[row] <= time ? row : -1;
  }

  // Return the row that covers a time and began last, of rows that may overlap; -1 = none.
  latestAt(range, time) {
    let [low, high] = range;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.from[middle] <= time) low = middle + 1;
      else high = middle;
    }
    const stop = Math.max(range[0], low - 4096);
    for (let row = low - 1; row >= stop; row -= 1) if (this.to[row] >= time) return row;
    return -1;
  }
}

// Write the mean colours of a lane's compute into pixels; `ground` shows where it is idle.
export function writeStrip(track, lane, view, pixels, offset, width, ground) {
  const [begin, end] = lane.compute;
  const [whole, red, green, blue] = track.sums;
  const { from, to, palette, colourOf } = track;
  const step = (view.to - view.from) / width;
  let row = track.firstAfter(view.from, begin, end);
  const before = [0, 0, 0, 0];
  const now = [0, 0, 0, 0];
  const read = (time, into) => {
    while (row < end && to[row] <= time) row += 1;
    into[0] = whole[row];
    into[1] = red[row];
    into[2] = green[row];
    into[3] = blue[row];
    if (row < end && from[row] < time) {
      const part = time - from[row];
      const mixed = palette[colourOf[row]].rgb;
      into[0] += part;
      into[1] += part * mixed[0];
      into[2] += part * mixed[1];
      into[3] += part * mixed[2];
    }
  };
  read(view.from, before);
  for (let x = 0; x < width; x += 1) {
    read(view.from + (x + 1) * step, now);
    const share = Math.min(1, (now[0] - before[0]) / step);
    const length = now[0] - before[0] || 1;
    const at = offset + 4 * x;
    for (let part = 0; part < 3; part += 1) {
      const mean = (now[part + 1] - before[part + 1]) / length;
      pixels[at + part] = ground[part] + (mean - ground[part]) * share;
    }
    pixels[at + 3] = 255;
    before[0] = now[0];
    before[1] = now[1];
    before[2] = now[2];
    before[3] = now[3];
  }
}
