// Small pieces that the views are made of. Text always becomes text nodes, never HTML.
const SVG = "http://www.w3.org/2000/svg";

function built(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, of] of Object.entries(value)) node.style.setProperty(key, of);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (tag, props = {}, ...children) => built(document.createElement(tag), props, children);
export const s = (tag, props = {}, ...children) => built(document.createElementNS(SVG, tag), props, children);

// ---------------------------------------------------------------- numbers

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const digits = size >= 0.001 && size < 10000 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);
  return (value > 0 ? "+" : "") + digits.replaceAll("-", "−");
}

export const error = (value) => (value === 0 ? "0" : value?.toExponential(1).replace("-", "−"));
export const plain = (value) => number(value).replace("+", "");
export function percent(share) {
  if (share >= 0.0005 || share === 0) return `${(100 * share).toFixed(1)} %`;
  return `${share >= 1e-6 ? Number((100 * share).toPrecision(1)) : (100 * share).toExponential(0).replace("-", "−")} %`;
}
export const largest = (values) => Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-30);

// Numbers that stand together have as many decimals, three digits for the largest of them.
export function together(most) {
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(most))));
  return (value) => {
    const digits = Math.abs(value).toFixed(decimals);
    return value === 0 ? "0" : (value < 0 ? "−" : "+") + digits;
  };
}

// Numbers of one sum share a last digit: three digits for the smallest that matters. Their sum is off by roundings only.
export function alike(values) {
  const sizes = values.filter((value) => typeof value === "number" && value !== 0).map(Math.abs);
  const most = Math.max(...sizes);
  if (!(most >= 1e-4 && most < 1e9)) return number;
  return together(Math.min(...sizes.filter((size) => size >= most / 100)));
}

export function tint(value, most) {
  return { "--tint": `var(--${value < 0 ? "orange" : "blue"})`, "--strength": (0.03 + 0.67 * Math.abs(value ?? 0) / most).toFixed(3) };
}

// ---------------------------------------------------------------- tokens, bars, tables, sums

// Text with a picture for every control character, and without halves of characters: no XML holds these.
export const printable = (text) => text.replace(/[\0-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
  .replace(/[\x7f-\x9f\ufffe\uffff]|\p{Surrogate}/gu, "\ufffd");
export const visible = (token) => printable(token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\u00a0", "⍽").replace(/^ $| {2,}/g, (spaces) => "·".repeat(spaces.length))) || "∅";
export const quoted = (token) => `“${visible(token).trim() || visible(token)}”`;

// A label of the library, with tokens written as everywhere on the page.
export const worded = (label) => label.replace(/'((?:[^'\\]|\\.)*)'/g, (_, text) => quoted(text.replaceAll("\\n", "\n").replaceAll("\\'", "'")));

export function chips(tokens, { values, most = values ? largest(values) : 1, says, selected, changed, linked, pick, label }) {
  const start = selected ?? 0;
  return h("div", { class: "chips", role: "group", "aria-label": label, "data-rove": "" }, tokens.map((token, at) => {
    const said = `${visible(token)}, position ${at}${values ? `: ${says?.(at) ?? number(values[at])}` : ""}`;
    const kinds = ["chip", changed?.[at] && "changed", at === linked && "linked"].filter(Boolean).join(" ");
    return h(pick ? "button" : "span", {
      type: pick ? "button" : undefined, class: kinds, title: says?.(at) ?? (values ? `${values[at]}` : said), "aria-label": said,
      role: pick ? undefined : "img", "aria-pressed": pick && selected !== undefined ? String(at === selected) : undefined,
      "data-at": at, "data-item": "", tabindex: at === start ? 0 : -1,
      style: values ? tint(values[at], most) : {}, onclick: pick ? () => pick(at) : undefined,
    }, visible(token));
  }));
}

// A token's leading space is a dot before its name, so that names stand in one line.
export const spaced = (name) => ({ kind: /^ \S/.test(name) ? " spaced" : "", name: name.replace(/^ (?=\S)/, "") });

// A token's position after its text, as “John” 10, is no number of the list.
const placed = (name) => {
  const [, token, at] = /^(.*”) (\d+)$/s.exec(name) ?? [];
  return at === undefined ? [name] : [`${token} `, h("small", {}, at)];
};

const LISTED = 8;

// The rows of a list that have the largest scores, and if scores sum to something, all others as one.
export function strongest(rows, summed = true) {
  const ordered = rows.filter((row) => row.score).sort((a, b) => Math.abs(b.score) - Math.abs(a.score));
  const rest = ordered.splice(LISTED);
  if (summed && rest.length) ordered.push({ name: `${rest.length} others`, score: rest.reduce((total, row) => total + row.score, 0), muted: true });
  return ordered;
}

export function bars(rows, { pick, label, unsigned, selected, shown } = {}) {
  const most = largest(rows.filter((row) => !row.muted).map((row) => row.score)); // all others are a number without a bar
  shown ??= together(largest(rows.map((row) => row.score)));
  const oneSided = unsigned || !rows.some((row) => row.score < 0) || !rows.some((row) => row.score > 0);
  const cells = rows.flatMap((row) => {
    const share = 100 * Math.abs(row.score) / most;
    const width = oneSided ? share : share / 2;
    const left = oneSided ? 0 : row.score < 0 ? 50 - width : 50;
    const full = visible(row.name);
    const { kind, name } = spaced(full);
    const pressed = selected === undefined ? undefined : String(row.pick === selected);
    return [
      pick && row.pick !== undefined
        ? h("button", { type: "button", class: `name${kind}`, title: full, "aria-pressed": pressed, onclick: () => pick(row.pick) }, ...placed(name))
        : h("span", { class: row.muted ? "name soft" : `name${kind}`, title: full }, ...placed(name)),
      h("span", { class: oneSided ? "bars-bar" : "bars-bar signed", "aria-hidden": "true" },
        row.muted ? null : h("i", { style: { ...tint(row.score, most), width: `${width}%`, left: `${left}%` } })),
      h("span", { class: "value", title: String(row.score) }, row.shown ?? shown(row.score)),
    ];
  });
  return h("div", { class: "bars", role: "group", "aria-label": label }, cells);
}

// Probabilities of two runs, side by side on one scale.
export function sideBySide(rows, names, { label, selected, pick }) {
  const most = Math.max(...rows.map((of) => Math.max(of.chance, of.other_chance)));
  const bar = (chance, kind) => [
    h("span", { class: "bars-bar", "aria-hidden": "true" }, h("i", { class: kind, style: { width: `${100 * chance / most}%` } })),
    h("span", { class: "value", title: String(chance) }, percent(chance))];
  return h("div", { class: "bars runs", role: "group", "aria-label": label },
    h("span", {}), h("small", {}, names[0]), h("span", {}), h("small", {}, names[1]), h("span", {}),
    rows.flatMap((of) => {
      const { kind, name } = spaced(visible(of.text));
      const title = visible(of.text);
      return [
        pick ? h("button", { type: "button", class: `name${kind}`, title, "aria-pressed": String(of.id === selected), onclick: () => pick(of.id) }, name) : h("span", { class: `name${kind}`, title }, name),
        ...bar(of.chance, "first"), ...bar(of.other_chance, "second")];
    }));
}

export function matrix(rows, columns, values, { pick, selected, label, blank }) {
  const most = largest(values.flat());
  const rounded = together(most);
  const shown = (value) => (blank && !/[1-9]/.test(rounded(value)) ? "" : rounded(value));
  let first = true;
  return h("div", { class: "scroll" }, h("table", { class: "matrix", "aria-label": label, "data-rove": "" },
    h("tr", {}, h("th", {}), columns.map((name) => h("th", { scope: "col" }, name))),
    rows.map((name, r) => h("tr", {}, h("th", { scope: "row" }, name), values[r].map((value, c) => {
      if (value === null || value === undefined) return h("td", { class: "empty" });
      const chosen = selected?.(r, c);
      const said = `${name} ${columns[c]}: ${number(value)}`;
      const inside = pick
        ? h("button", { type: "button", title: String(value), "aria-label": said, "aria-pressed": String(Boolean(chosen)), "data-cell": `${r},${c}`, "data-item": "", tabindex: first ? 0 : -1, onclick: () => pick(r, c) }, shown(value))
        : h("span", { title: String(value) }, shown(value));
      first = false;
      return h("td", { style: tint(value, most) }, inside);
    })))));
}

// The same with a column for each layer and no numbers: these are read where the pointer or the keyboard is.
export function map(rows, columns, values, { pick, selected, label }) {
  const most = largest(values.flat());
  const shown = together(most);
  const read = h("output", { class: "soft" }, "Point at a cell to read its number.");
  const say = (r, c) => { read.textContent = `${rows[r]}${columns[c] === "MLP" ? " MLP" : columns[c]} ${shown(values[r][c])}`; };
  const cells = columns.map((name, c) => h("tr", {}, h("th", { scope: "row" }, name), rows.map((row, r) => {
    const value = values[r][c];
    if (value === null || value === undefined) return h("td", { class: "empty" });
    return h("td", { style: tint(value, most) }, h("button", {
      type: "button", title: `${row} ${name}: ${value}`, "aria-label": `${row} ${name}: ${number(value)}`, "aria-pressed": String(Boolean(selected(r, c))),
      "data-cell": `${r},${c}`, "data-item": "", tabindex: r || c ? -1 : 0, onclick: () => pick(r, c), onpointerenter: () => say(r, c), onfocus: () => say(r, c),
    }));
  })));
  const layers = h("tr", {}, h("th", {}), rows.map((row, r) => h("th", { scope: "col" }, r % 5 ? "" : row)));
  const table = h("table", { class: "matrix map", "aria-label": label, "data-rove": "" }, cells, layers);
  const scroll = h("div", { class: "scroll" }, table);
  const sizes = values.map((column) => largest(column));
  const strongest = sizes.indexOf(Math.max(...sizes));
  requestAnimationFrame(() => { // once it is on the page: the strongest column is in view
    const cell = table.querySelector(`[data-cell^="${strongest},"]`);
    if (cell) scroll.scrollLeft += cell.getBoundingClientRect().right - scroll.getBoundingClientRect().left - scroll.clientWidth / 2;
  });
  return h("div", {}, scroll, read);
}

// An equation: each part is [what it is, value, what the pointer shows]; "=" begins the total.
export function sum(parts, shown = alike(parts.map((part) => part[1]))) {
  const line = parts.filter((part) => part[1] !== null && part[1] !== undefined);
  return h("p", { class: "sum" }, line.map(([name, value, full]) => h("span", {}, `${name} `,
    h("b", { title: String(full ?? value) }, typeof value === "number" ? shown(value) : value))));
}

export function card(kind, title, about, exported, ...body) {
  return h("section", { class: `card ${kind}`, "aria-label": title },
    h("header", {}, h("div", {}, h("h2", {}, title), about ? h("small", {}, about) : null), exported), ...body);
}

export { copy, menu } from "./export.js";
