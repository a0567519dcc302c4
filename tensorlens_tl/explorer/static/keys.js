// The keyboard: arrows move inside a group of tokens, cells or nodes; Escape closes; z goes back; / is the prompt.
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const middle = (node) => {
  const box = node.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
};

// The nearest item on the side that the arrow points to; in a line of text also the next or the one before.
export function neighbour(items, item, [right, down]) {
  const [x, y] = middle(item);
  let best = null;
  let least = Infinity;
  for (const other of items) {
    const [dx, dy] = middle(other).map((value, axis) => value - [x, y][axis]);
    const along = right ? dx * right : dy * down;
    const across = Math.abs(right ? dy : dx);
    if (along < 3 || (right && across > 8)) continue;
    const far = along + (right ? 0 : 2 * across);
    if (far < least) { best = other; least = far; }
  }
  return best ?? (right ? items[items.indexOf(item) + right] : null) ?? null;
}

// What a control is called, however often it is drawn again: its place, its id, its label, or what stands on it.
function called(control) {
  const { at, cell, node } = control.dataset;
  const label = control.matches("select, input") ? control.getAttribute("aria-label") : null;
  const group = control.closest("[data-rove]")?.getAttribute("aria-label") ?? "";
  return [control.localName, group, at ?? cell ?? node ?? (control.id || (label ?? control.textContent))].join("|");
}

// Draws a place again; the keyboard stays where it was, or goes to what is chosen there.
export function redraw(place, drawn) {
  const active = document.activeElement;
  const name = place.contains(active) ? called(active) : undefined;
  if (place.firstChild === drawn) return;
  place.replaceChildren(drawn);
  if (name === undefined) return;
  const controls = [...place.querySelectorAll("button, select, input, summary, [tabindex]")];
  const again = controls.find((control) => called(control) === name) ?? place.querySelector("[aria-pressed=true]") ?? controls[0];
  again?.focus({ preventScroll: true });
}

export function listen({ escape, undo, redo, prompt }) {
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof Element && event.target.closest("textarea, input, select");
    if (event.key === "Escape") {
      const open = document.querySelector("details.menu[open]");
      if (open) { open.open = false; open.querySelector("summary").focus(); } else if (typing) event.target.blur(); else escape();
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const group = event.target instanceof Element && event.target.closest("[data-rove]");
    if (group && ARROWS[event.key]) {
      const items = [...group.querySelectorAll("[data-item]")];
      const next = neighbour(items, event.target.closest("[data-item]"), ARROWS[event.key]);
      event.preventDefault();
      if (!next) return;
      for (const item of items) item.setAttribute("tabindex", item === next ? 0 : -1);
      next.focus();
    } else if (event.key === "z") undo();
    else if (event.key === "Z") redo();
    else if (event.key === "/") { event.preventDefault(); prompt(); }
  });
  document.addEventListener("click", (event) => { // one menu is open at most
    for (const open of document.querySelectorAll("details.menu[open]")) if (!open.contains(event.target)) open.open = false;
  });
}
