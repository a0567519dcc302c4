// What leaves the page: tables as CSV, pictures as SVG and PNG, and the code behind a view.
import { h, largest, number, printable, visible } from "./draw.js";

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function csv(table) {
  const cell = (value) => (/[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [table.columns, ...table.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

const escaped = (text) => printable(String(text)).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
const NAME = 40; // letters of a row's name
const wide = (text) => [...text].reduce((width, letter) => width + (letter > "\u2e7f" ? 11 : 6.6), 0);

// A table as a picture: bars where it has a name and a score, else shaded cells.
export function tablePicture(title, table) {
  const names = table.rows.map((row) => [...visible(String(row[0]))].slice(0, NAME).join(""));
  const heads = table.columns.slice(1).map(String);
  const one = heads.length === 1;
  const left = Math.ceil(Math.max(104, 8 + Math.max(0, ...names.map(wide)))); // where the names end
  const cell = Math.ceil(Math.max(58, 10 + Math.max(0, ...heads.map(wide))));
  const draw = one ? barRow : cellRow;
  const most = largest(table.rows.flatMap((row) => row.slice(1)));
  const body = table.rows.map((row, r) => {
    const y = 46 + 20 * r;
    return `<text x="${left}" y="${y + 12}" text-anchor="end">${escaped(names[r])}</text>${draw(row.slice(1), { left, cell, y, most })}`;
  });
  const top = one ? [] : heads.map((name, c) => `<text x="${left + cell * (c + 1)}" y="40" text-anchor="end" fill="#666">${escaped(name)}</text>`);
  const width = Math.ceil(Math.max(left + (one ? 356 : cell * heads.length + 8), 16 + 1.3 * wide(title)));
  const height = 52 + 20 * table.rows.length;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/><text x="8" y="18" font-size="13" font-weight="600">${escaped(title)}</text>${top.join("")}${body.join("")}</svg>`;
}

const colour = (value) => (value < 0 ? "#eb7828" : "#4292e6");
const isNumber = (value) => value !== null && value !== undefined && value !== "";

function barRow([value], { left, y, most }) {
  if (!isNumber(value)) return "";
  const middle = left + 146;
  const length = 120 * Math.abs(value) / most;
  return `<rect x="${value < 0 ? middle - length : middle}" y="${y + 2}" width="${length}" height="13" fill="${colour(value)}"/><text x="${left + 351}" y="${y + 12}" text-anchor="end">${number(value)}</text>`;
}

function cellRow(values, { left, cell, y, most }) {
  const drawn = values.map((value, c) => (isNumber(value)
    ? `<rect x="${left + 6 + cell * c}" y="${y}" width="${cell - 2}" height="18" fill="${colour(value)}" fill-opacity="${(0.7 * Math.abs(value) / most).toFixed(3)}"/><text x="${left + cell * (c + 1)}" y="${y + 13}" text-anchor="end">${number(value)}</text>`
    : ""));
  return drawn.join("");
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

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow copying";
  }
}

// Exports of a view; `picture` draws another SVG than that of its table.
export function menu(title, name, table, code, picture) {
  const source = () => (picture ? picture() : tablePicture(title, table));
  return h("details", { class: "menu" }, h("summary", { "aria-label": `Export ${title}` }, "Export"), h("div", {},
    h("button", { type: "button", class: "code", "data-code": code, onclick: (event) => copy(code, event.target) }, "Copy as Python"),
    h("button", { type: "button", "data-save": "csv", onclick: () => save(`${name}.csv`, new Blob([csv(table)], { type: "text/csv" })) }, "Save CSV"),
    h("button", { type: "button", "data-save": "svg", onclick: () => save(`${name}.svg`, new Blob([source()], { type: "image/svg+xml" })) }, "Save SVG"),
    h("button", { type: "button", "data-save": "png", onclick: () => png(source(), name) }, "Save PNG")));
}
