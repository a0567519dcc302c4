// What the page shows is in its address, so that a link, a reload, undo and redo all give the same page.
const NUMBERS = ["query", "target", "layer", "head", "key", "nodes", "dictionary", "feature", "at"];
const TEXTS = ["text", "other", "method", "node", "pick"];
const RUN = ["text", "other", "query", "target", "minus"];

// The fields that a view depends on: an answer stands until one of them changes.
const FIELDS = {
  prompt: RUN, components: RUN, routes: RUN,
  tokens: [...RUN, "method"],
  graph: [...RUN, "nodes"],
  head: [...RUN, "layer", "head", "key"],
  ablate: [...RUN, "node"], neurons: [...RUN, "node"],
  features: [...RUN, "dictionary"],
  feature: [...RUN, "dictionary", "feature", "at"],
};

// What is selected; a new question leaves it behind.
export const NOTHING = { layer: undefined, head: undefined, key: undefined, node: undefined, pick: undefined, feature: undefined, at: undefined };

export function read() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) if (fields.get(name)) state[name] = fields.get(name);
  for (const name of NUMBERS) if (/^\d+$/.test(fields.get(name) ?? "")) state[name] = Number(fields.get(name));
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

export async function ask(view, state) {
  const fields = FIELDS[view] ? Object.fromEntries(FIELDS[view].map((name) => [name, state[name]])) : state;
  const body = JSON.stringify(fields);
  if (answered[view]?.body === body) return answered[view].answer;
  running[view]?.abort();
  const mine = (running[view] = new AbortController());
  const response = await fetch(`/api/${view}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Token": new URLSearchParams(location.search).get("token") ?? "" },
    body,
    signal: mine.signal,
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  answered[view] = { body, answer };
  return answer;
}
