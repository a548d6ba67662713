// Packed columns, unpacked: base64, gzip, planes of bytes, differences (see report/columns.py).

const COLUMNS_VERSION = 1;

function bytesOf(text) {
  if (typeof Uint8Array.fromBase64 === "function") return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const result = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at += 1) result[at] = raw.charCodeAt(at);
  return result;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function decodeColumn(about, data, at) {
  const rows = about.rows;
  const values = new Uint32Array(rows);
  for (let plane = 0; plane < about.width; plane += 1) {
    const shift = 8 * plane;
    const first = at + plane * rows;
    for (let row = 0; row < rows; row += 1) values[row] |= data[first + row] << shift;
  }
  if (about.delta) {
    let sum = 0;
    for (let row = 0; row < rows; row += 1) {
      const value = values[row];
      sum = (sum + ((value >>> 1) ^ -(value & 1))) >>> 0;
      values[row] = sum;
    }
  }
  const whole = about.signed ? new Int32Array(values.buffer) : values;
  if (about.scale === undefined) return whole;
  const result = new Float64Array(rows);
  for (let row = 0; row < rows; row += 1) result[row] = about.base + about.scale * whole[row];
  return result;
}

// Return the columns of packed ones by name.
export async function unpack(packed) {
  if (packed.version !== COLUMNS_VERSION) {
    throw new Error(`columns are of version ${packed.version}; expected ${COLUMNS_VERSION}`);
  }
  const data = await inflate(bytesOf(packed.data));
  const result = {};
  let at = 0;
  for (const about of packed.columns) {
    result[about.name] = decodeColumn(about, data, at);
    at += about.rows * about.width;
  }
  return result;
}
