// Reading by pointer and by keyboard. Listeners sit on the document, once for all pictures on a page, so the order in
// which a notebook adds pictures and scripts does not matter. Text is only ever set as text.
(() => {
  const before = window.tensorlensPictures;
  const STEPS = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const decoded = new WeakMap();

  const values = (grid) => {
    const held = decoded.get(grid);
    if (held && held.from === grid.dataset.values) return held.values;
    const bytes = Uint8Array.from(atob(grid.dataset.values), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const found = Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
    decoded.set(grid, { from: grid.dataset.values, values: found });
    return found;
  };
  const digits = (value) => (value >= 0 ? "+" : "") + Number(value.toPrecision(4));

  window.tensorlensPictures = { values, digits };
  if (before) return;

  const read = (grid, row, column) => {
    const width = Number(grid.dataset.width);
    const all = values(grid);
    const height = all.length / width;
    row = Math.max(0, Math.min(height - 1, row));
    column = Math.max(0, Math.min(width - 1, column));
    const rows = grid.querySelector(".rows").children;
    const columns = grid.querySelector(".cols").children;
    grid.querySelectorAll(".on").forEach((label) => label.classList.remove("on"));
    rows[row].classList.add("on");
    columns[column].classList.add("on");
    const cursor = grid.querySelector(".cursor");
    cursor.hidden = false;
    cursor.style.left = `calc(var(--c) * ${column})`;
    cursor.style.top = `calc(var(--c) * ${row})`;
    grid.dataset.row = row;
    grid.dataset.column = column;
    const out = grid.parentElement.nextElementSibling;
    out.textContent = `${rows[row].textContent} (${row}) ← ${columns[column].textContent} (${column}): ${digits(all[row * width + column])}`;
  };

  document.addEventListener("pointermove", (event) => {
    const cells = event.target instanceof Element && event.target.closest(".tlens .cells");
    if (!cells) return;
    const grid = cells.closest(".grid");
    const box = cells.getBoundingClientRect();
    const count = Number(grid.dataset.width);
    const size = box.width / count;
    read(grid, Math.floor((event.clientY - box.top) / size), Math.floor((event.clientX - box.left) / size));
  });

  document.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || event.defaultPrevented || !(event.target instanceof Element)) return;
    if (event.target.matches(".tlens .grid")) {
      const grid = event.target;
      const seen = "row" in grid.dataset;
      read(grid, seen ? Number(grid.dataset.row) + step[0] : 0, seen ? Number(grid.dataset.column) + step[1] : 0);
      grid.querySelector(".cursor").scrollIntoView({ block: "nearest", inline: "nearest" });
      event.preventDefault();
    } else if (event.target.matches(".tlens .rove .t")) {
      const group = event.target.closest(".rove");
      const marks = [...group.querySelectorAll(".t:not([hidden])")];
      const next = marks[marks.indexOf(event.target) + step[0] * Number(group.dataset.width ?? 1) + step[1]];
      if (!next) return;
      event.target.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
      event.preventDefault();
    }
  });

  const say = (event) => {  // inside SVG a style sheet cannot add text
    const mark = event.target instanceof Element && event.target.closest(".tlens .graph .t");
    if (mark) mark.closest(".graph").querySelector(".out").textContent = mark.getAttribute("aria-label");
  };
  document.addEventListener("pointerover", say);
  document.addEventListener("focusin", say);

  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element && event.target.closest(".tlens .thumbs button");
    if (!button) return;
    const group = button.closest(".multiples");
    group.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", other === button));
    const grid = group.querySelector(".grid");
    grid.dataset.values = button.dataset.values;
    grid.querySelector("img").src = button.querySelector("img").src;
    group.querySelector(".bar").outerHTML = button.dataset.bar;
    const what = `${group.querySelector(".thumbs").getAttribute("aria-label")}, ${button.textContent}`;
    grid.setAttribute("aria-label", `${what}; use the arrow keys to read its cells`);
    if ("row" in grid.dataset) read(grid, Number(grid.dataset.row), Number(grid.dataset.column));
  });
})();
