// Questions to the server: JSON there and back; what it refuses is an error of one line.

const API = "/ui/api";

function wordsOf(status, found) {
  const { detail } = found || {};
  if (typeof detail === "string") return detail;
  if (Array.isArray(detail)) return detail.map((each) => `${each.loc.slice(1).join(".")}: ${each.msg}`).join("; ");
  return `the server answers ${status}`;
}

async function ask(method, path, body) {
  const given = { method, headers: {}, credentials: "same-origin" };
  if (body !== undefined) {
    given.headers["Content-Type"] = "application/json";
    given.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(`${API}${path}`, given);
  } catch {
    throw new Error("the server does not answer; is 'partita ui' still running?");
  }
  const found = await answer.json().catch(() => null);
  // What somebody typed may be wrong without anything having failed.
  if (answer.ok && found && typeof found.problem === "string") throw new Error(found.problem);
  if (!answer.ok) throw Object.assign(new Error(wordsOf(answer.status, found)), { status: answer.status });
  return found;
}

export const get = (path) => ask("GET", path);
export const post = (path, body) => ask("POST", path, body);
export const remove = (path) => ask("DELETE", path);

const AGAIN_MS = 2000;

// Follow a stream of the server; returns what ends that. Where it breaks off, `state` is asked for
// until it is there again. A tab that nobody sees holds no connection, of which browsers have few.
export function follow(path, listeners, state) {
  let stream = null;
  let timer = null;
  let ended = false;
  const look = () => get(state.path).then((found) => ended || listeners[state.name](found), (error) => ended || listeners.lost(error));
  const close = () => {
    clearTimeout(timer);
    if (stream) stream.close();
    stream = null;
  };
  const open = () => {
    close();
    if (document.hidden) return;
    stream = new EventSource(`${API}${path}`);
    for (const [name, listener] of Object.entries(listeners)) {
      if (name !== "lost") stream.addEventListener(name, (event) => listener(JSON.parse(event.data)));
    }
    stream.addEventListener("error", () => {
      close();
      timer = setTimeout(open, AGAIN_MS);
      look();
    });
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", open);
    close();
  };
}

export function documentAddress(id) {
  return `${API}/documents/${encodeURIComponent(id)}`;
}

// Return the values of an address: several of one name are a list.
export function valuesOf(search) {
  const found = {};
  for (const [name, value] of new URLSearchParams(search)) {
    if (name in found) found[name] = [].concat(found[name], value);
    else found[name] = value;
  }
  return found;
}

export function searchOf(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const each of [].concat(value)) if (each !== "" && each !== null && each !== undefined) found.append(name, each);
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}
