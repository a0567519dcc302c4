// Small pieces that the views are made of. Text always becomes text nodes, never HTML.
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, of] of Object.entries(value)) node.style.setProperty(key, of);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const digits = size >= 0.001 && size < 10000 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);
  return (value > 0 ? "+" : "") + digits.replaceAll("-", "−");
}

export const error = (value) => (value === 0 ? "0" : value?.toExponential(1).replace("-", "−"));

// Numbers that stand together have as many decimals, three digits for the largest of them.
function together(most) {
  const decimals = Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(most))));
  return (value) => {
    const digits = Math.abs(value).toFixed(decimals);
    if (Number(digits) === 0) return "0";
    return (value < 0 ? "−" : "+") + digits;
  };
}

export const plain = (value) => number(value).replace("+", "");
export const largest = (values) => Math.max(...values.map((value) => Math.abs(value ?? 0)), 1e-30);

export function tint(value, most) {
  return { "--tint": `var(--${value < 0 ? "orange" : "blue"})`, "--strength": (0.04 + 0.66 * Math.abs(value ?? 0) / most).toFixed(3) };
}

export const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export function chips(tokens, { values, selected, changed, pick, label }) {
  const most = values ? largest(values) : 1;
  return h("div", { class: "chips", role: "group", "aria-label": label }, tokens.map((token, at) => {
    const said = values ? `${visible(token)}, position ${at}: ${number(values[at])}` : `${visible(token)}, position ${at}`;
    return h("button", {
      type: "button", class: changed?.[at] ? "chip changed" : "chip", title: values ? `${values[at]}` : said, "aria-label": said,
      "aria-pressed": selected === undefined ? undefined : String(at === selected), "data-at": at,
      style: values ? tint(values[at], most) : {}, onclick: () => pick?.(at),
    }, visible(token));
  }));
}

export function bars(rows, { pick, label, unsigned } = {}) {
  const most = largest(rows.map((row) => row.score));
  const shown = together(most);
  const cells = rows.flatMap((row) => {
    const share = 100 * Math.abs(row.score) / most;
    const width = unsigned ? share : share / 2;
    const left = unsigned ? 0 : row.score < 0 ? 50 - width : 50;
    const name = visible(row.name);
    return [
      pick && row.pick !== undefined
        ? h("button", { type: "button", class: "name", title: name, onclick: () => pick(row.pick) }, name)
        : h("span", { class: "name", title: name }, name),
      h("span", { class: unsigned ? "bar" : "bar signed", "aria-hidden": "true" },
        h("i", { style: { ...tint(row.score, most), width: `${width}%`, left: `${left}%` } })),
      h("span", { class: "value", title: String(row.score) }, row.shown ?? shown(row.score)),
    ];
  });
  return h("div", { class: "bars", role: "group", "aria-label": label }, cells);
}

export function matrix(rows, columns, values, { pick, selected, label }) {
  const most = largest(values.flat());
  const shown = together(most);
  return h("div", { class: "scroll" }, h("table", { class: "matrix", "aria-label": label },
    h("tr", {}, h("th", {}), columns.map((name) => h("th", { scope: "col" }, name))),
    rows.map((name, r) => h("tr", {}, h("th", { scope: "row" }, name), values[r].map((value, c) => {
      if (value === null || value === undefined) return h("td", { style: { background: "none" } });
      const chosen = selected?.(r, c);
      const said = `${name} ${columns[c]}: ${number(value)}`;
      const inside = pick
        ? h("button", { type: "button", title: String(value), "aria-label": said, "aria-pressed": String(Boolean(chosen)), "data-cell": `${r},${c}`, onclick: () => pick(r, c) }, shown(value))
        : h("span", { title: String(value) }, shown(value));
      return h("td", { style: tint(value, most) }, inside);
    })))));
}

export function sum(parts) {
  const line = parts.filter((part) => part[1] !== null && part[1] !== undefined);
  return h("p", { class: "sum" }, line.flatMap(([name, value, full], at) => [
    at ? " · " : "", `${name} `, h("b", { title: String(full ?? value) }, typeof value === "number" ? number(value) : value)]));
}

// ---------------------------------------------------------------- files

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv(table) {
  const cell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [table.columns, ...table.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

// A table as a picture: bars where it has a name and a score, else shaded cells.
function svg(title, table) {
  const scores = table.rows.map((row) => row.slice(1));
  const most = largest(scores.flat());
  const fill = (value) => (value < 0 ? "#d66014" : "#2166ac");
  const one = table.columns.length === 2;
  const width = one ? 460 : 110 + 58 * (table.columns.length - 1);
  const height = 52 + 20 * table.rows.length;
  const body = table.rows.map((row, r) => {
    const y = 46 + 20 * r;
    const name = `<text x="104" y="${y + 12}" text-anchor="end">${escaped(visible(String(row[0]))).slice(0, 40)}</text>`;
    const cells = row.slice(1).map((value, c) => {
      if (value === null || value === undefined || value === "") return "";
      if (one) {
        const length = 120 * Math.abs(value) / most;
        return `<rect x="${value < 0 ? 250 - length : 250}" y="${y + 2}" width="${length}" height="13" fill="${fill(value)}"/><text x="455" y="${y + 12}" text-anchor="end">${number(value)}</text>`;
      }
      return `<rect x="${110 + 58 * c}" y="${y}" width="56" height="18" fill="${fill(value)}" fill-opacity="${(0.7 * Math.abs(value) / most).toFixed(3)}"/><text x="${162 + 58 * c}" y="${y + 13}" text-anchor="end">${number(value)}</text>`;
    });
    return name + cells.join("");
  });
  const heads = one ? "" : table.columns.slice(1).map((name, c) => `<text x="${162 + 58 * c}" y="40" text-anchor="end" fill="#666">${escaped(name)}</text>`).join("");
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/><text x="8" y="18" font-size="13" font-weight="600">${escaped(title)}</text>${heads}${body.join("")}</svg>`;
}

function png(source, name) {
  const picture = new Image();
  picture.onload = () => {
    const canvas = h("canvas", { width: 2 * picture.width, height: 2 * picture.height });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(`${name}.png`, blob));
  };
  picture.src = URL.createObjectURL(new Blob([source], { type: "image/svg+xml" }));
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow copying";
  }
}

export { copy };

export function menu(title, name, table, code) {
  const source = () => svg(title, table);
  return h("details", { class: "menu" }, h("summary", { "aria-label": `Export ${title}` }, "Export ▾"), h("div", {},
    h("button", { type: "button", class: "code", "data-code": code, onclick: (event) => copy(code, event.target) }, "Copy as Python"),
    h("button", { type: "button", onclick: () => save(`${name}.csv`, new Blob([csv(table)], { type: "text/csv" })) }, "Save CSV"),
    h("button", { type: "button", onclick: () => save(`${name}.svg`, new Blob([source()], { type: "image/svg+xml" })) }, "Save SVG"),
    h("button", { type: "button", onclick: () => png(source(), name) }, "Save PNG")));
}

export function card(kind, title, about, exported, ...body) {
  return h("section", { class: `card ${kind}`, "aria-label": title },
    h("header", {}, h("div", {}, h("h2", {}, title), about ? h("small", {}, about) : null), exported), ...body);
}
