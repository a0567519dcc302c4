// What leaves the page: tables as CSV, pictures as SVG and PNG, and the code behind a view.
import { h, largest, number, visible } from "./draw.js";

function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function csv(table) {
  const cell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [table.columns, ...table.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

const escaped = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

// A table as a picture: bars where it has a name and a score, else shaded cells.
function tablePicture(title, table) {
  const scores = table.rows.map((row) => row.slice(1));
  const most = largest(scores.flat());
  const fill = (value) => (value < 0 ? "#eb7828" : "#4292e6");
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
