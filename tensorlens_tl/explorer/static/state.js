// What the page shows is in its address, so that a link, a reload, undo and redo all give the same page.
const NUMBERS = ["query", "target", "layer", "head", "key", "nodes", "dictionary", "feature", "at", "new", "start", "stop", "measured", "removed"];
const TEXTS = ["text", "other", "method", "rule", "part", "node", "without", "by", "pick", "arranged", "image", "other_image", "hops", "chat"];
const RUN = ["text", "other", "chat", "image", "other_image", "query", "target", "minus", "new", "start"];

// The fields that a view depends on: an answer stands until one of them changes.
const FIELDS = {
  prompt: RUN, mends: RUN, removed: RUN, components: RUN, routes: RUN,
  tokens: [...RUN, "method", "rule"],
  graph: [...RUN, "nodes", "rule"],
  measured: [...RUN, "nodes"],
  head: [...RUN, "layer", "head", "key"],
  why: [...RUN, "layer", "head", "key", "part"],
  ablate: [...RUN, "without", "by"], neurons: [...RUN, "node"],
  features: [...RUN, "dictionary"],
  feature: [...RUN, "dictionary", "feature", "at"],
  generated: ["text", "other", "chat", "minus", "new", "start", "stop", "hops"],
  image: [...RUN, "method"],
};

// What is selected; a new question leaves it behind.
export const NOTHING = { layer: undefined, head: undefined, key: undefined, part: undefined, node: undefined, pick: undefined, feature: undefined, at: undefined };

// The heads and MLPs that are ablated, and the change that takes one of them in or out.
export const ablated = (state) => state.without?.split(",") ?? [];
export function toggled(state, name) {
  const nodes = ablated(state);
  const next = nodes.includes(name) ? nodes.filter((of) => of !== name) : [...nodes, name];
  return { without: next.join(",") || undefined, by: next.length ? state.by : undefined };
}

// Whether two runs are compared.
export const isPair = (state) => Boolean(state.other || state.other_image);

export function read() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) if (fields.get(name)) state[name] = fields.get(name);
  for (const name of NUMBERS) if (/^\d+$/.test(fields.get(name) ?? "")) state[name] = Number(fields.get(name));
  if (state.chat) state.chat = true;
  if (/^\d+$/.test(state.hops ?? "")) state.hops = Number(state.hops);
  const minus = fields.get("minus");
  if (minus === "none") state.minus = null;
  else if (/^\d+$/.test(minus ?? "")) state.minus = Number(minus);
  return state;
}

export function write(state) {
  const fields = new URLSearchParams();
  for (const name of [...TEXTS, ...NUMBERS]) if (state[name] !== undefined && state[name] !== null) fields.set(name, state[name]);
  if (state.minus !== undefined) fields.set("minus", state.minus === null ? "none" : state.minus);
  const address = `${location.pathname}${location.search}#${fields}`;
  if (location.hash.slice(1) !== fields.toString()) history.pushState(null, "", address);
}

// Asked of the server; a newer question of the same view ends an older one, and the same one is not asked again.
const running = {};
const answered = {};
let version; // of the model: how often the server has seen it change

function bodyOf(view, state) {
  const fields = FIELDS[view] ? Object.fromEntries(FIELDS[view].map((name) => [name, state[name]])) : { ...state };
  if (isPair(state)) delete fields.rule; // it is of one run
  if (view !== "generated" && state.start === undefined) { delete fields.new; delete fields.start; } // of the prompt alone
  return JSON.stringify(fields);
}

export const isAnswered = (view, state) => answered[view]?.body === bodyOf(view, state);

export function ask(view, state) {
  const body = bodyOf(view, state);
  if (answered[view]?.body === body) return Promise.resolve(answered[view].answer);
  if (running[view]?.body === body) return running[view].answer;
  running[view]?.controller.abort();
  const controller = new AbortController();
  const mine = (running[view] = { body, controller });
  mine.answer = asked(view, body, controller.signal).finally(() => { if (running[view] === mine) delete running[view]; });
  return mine.answer;
}

async function asked(view, body, signal) {
  const answer = await post(view, body, signal);
  const before = version;
  if (answer.version !== undefined) version = answer.version;
  if (before !== undefined && version > before) {
    forget();
    dispatchEvent(new Event("changed"));
  }
  answered[view] = { body, answer };
  return answer;
}

// What was answered is asked again.
export function forget() {
  for (const view of Object.keys(answered)) if (view !== "about") delete answered[view];
}

// Nobody waits for these answers any more: the server drops the questions, or stops at the next block.
export function stop(needed = []) {
  for (const [view, { controller }] of Object.entries(running)) if (!needed.includes(view)) { controller.abort(); delete running[view]; }
}

export const token = () => new URLSearchParams(location.search).get("token") ?? "";

export async function post(path, body, signal) {
  const response = await fetch(`/api/${path}`, { method: "POST", headers: { "X-Token": token() }, body, signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
