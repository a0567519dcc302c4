// A contribution graph that answers: hide small edges, choose a node, pin, group, search. The picture is complete without
// it. Listeners sit on the document, once for all graphs on a page; each graph's state hangs on its element.
(() => {
  if (window.tensorlensGraphs) return;
  window.tensorlensGraphs = true;
  document.documentElement.classList.add("tensorlens-live");
  const SHOWN = 40; // lines of a list; the others are one more
  const states = new WeakMap();
  const digits = (value) => (value >= 0 ? "+" : "") + Number(value.toPrecision(4));
  const total = (edges) => edges.reduce((sum, edge) => sum + edge.weight, 0);

  const make = (parent, name, text = "", attributes = {}) => {
    const element = parent.namespaceURI?.endsWith("svg") ? document.createElementNS(parent.namespaceURI, name) : document.createElement(name);
    element.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return parent.appendChild(element);
  };

  const stateOf = (element) => {
    const graph = element instanceof Element && element.closest(".tlens .circuit");
    if (!graph || !graph.querySelector("svg")) return null;
    if (!states.has(graph)) states.set(graph, read(graph));
    return states.get(graph);
  };

  const read = (graph) => {
    const svg = graph.querySelector("svg");
    const nodes = [...svg.querySelectorAll(".t")].map((mark) => {
      const circle = mark.querySelector("circle");
      return {
        mark, name: mark.dataset.name, at: `${mark.dataset.at} “${mark.dataset.token}”`,
        weight: Number(mark.dataset.weight), bias: Number(mark.dataset.bias),
        x: Number(circle.getAttribute("cx")), y: Number(circle.getAttribute("cy")), parent: null,
      };
    });
    const edges = [...svg.querySelectorAll("path[data-e]")].map((path) => {
      const [from, to, weight] = path.dataset.e.split(" ").map(Number);
      return { path, from: nodes[from], to: nodes[to], weight };
    });
    const state = { graph, svg, nodes, edges, sums: [], pinned: new Set(), chosen: null, sought: "" };
    state.largest = Math.max(...edges.map((edge) => Math.abs(edge.weight)));
    nodes.forEach((node) => dress(node.mark));
    show(state);
    return state;
  };
  const dress = (mark) => {
    mark.setAttribute("role", "button");
    mark.setAttribute("aria-pressed", "false");
  };
  const nodeOf = (state, mark) => state.nodes.find((node) => node.mark === mark);
  const holder = (node) => (node.parent ? holder(node.parent) : node);
  const kept = (state) => [...state.edges.filter((edge) => holder(edge.from) === edge.from && holder(edge.to) === edge.to), ...state.sums];
  const least = (state) => state.largest * (state.graph.querySelector(".least").value / 100) ** 2;
  const isShown = (state, edge, limit) => Math.abs(edge.weight) >= limit || (state.pinned.has(edge.from) && state.pinned.has(edge.to));

  // ------------------------------------------------------------------ what is seen

  const show = (state) => {
    const limit = least(state), all = kept(state), shown = new Set(all.filter((edge) => isShown(state, edge, limit)));
    const reached = new Set([state.chosen, ...state.pinned]);
    for (const edge of [...state.edges, ...state.sums]) {
      edge.path.toggleAttribute("hidden", !shown.has(edge));
      edge.path.classList.toggle("on", edge.from === state.chosen || edge.to === state.chosen);
      if (shown.has(edge)) reached.add(edge.from).add(edge.to);
    }
    state.svg.classList.toggle("picked", state.chosen !== null);
    state.svg.classList.toggle("sought", state.sought !== "");
    let found = 0;
    for (const node of state.nodes) {
      const fits = state.sought !== "" && `${node.name} ${node.at}`.toLowerCase().includes(state.sought);
      found += fits && !node.parent;
      node.mark.toggleAttribute("hidden", node.parent !== null);
      node.mark.setAttribute("aria-pressed", node === state.chosen);
      node.mark.classList.toggle("pinned", state.pinned.has(node));
      node.mark.classList.toggle("off", !reached.has(node));
      node.mark.classList.toggle("found", fits);
    }
    const tool = (name) => state.graph.querySelector(`.${name}`);
    const share = ((tool("least").value / 100) ** 2 * 100).toPrecision(2);
    tool("least").setAttribute("aria-valuetext", `below ${share} percent of the largest; ${shown.size} of ${all.length} edges shown`);
    tool("count").textContent = `${Number(share)} % of the largest: ${shown.size} of ${all.length} shown`;
    tool("hits").textContent = state.sought === "" ? "" : `${found} found`;
    tool("pin").disabled = state.chosen === null;
    tool("pin").setAttribute("aria-pressed", state.pinned.has(state.chosen));
    tool("join").disabled = state.pinned.size < 2;
    tool("part").hidden = !state.chosen?.members;
    list(state, all, limit);
  };

  const list = (state, all, limit) => {
    const side = state.graph.querySelector(".side"), node = state.chosen;
    side.replaceChildren();
    if (node === null) make(side, "p", "Click a node, or press Enter on it, for its inputs and outputs. Arrow keys move; P pins, Escape lets go.", { class: "n" });
    else {
      make(side, "div", `${node.name} at ${node.at}`, { class: "title" });
      if (!node.members) make(side, "div", `${digits(node.weight)} to the target`, { class: "n" });
      if (node.members) make(side, "div", node.members.map((member) => `${member.name} at ${member.at}`).join(", "), { class: "n" });
      flows(side, "Inputs", all.filter((edge) => edge.to === node), "from", limit, state);
      flows(side, "Outputs", all.filter((edge) => edge.from === node), "to", limit, state);
    }
    if (!state.pinned.size) return;
    const pinned = make(side, "div", "Pinned: ", { class: "n" });
    state.pinned.forEach((other) => make(pinned, "button", `${other.name} at ${other.at}`, { type: "button", class: "go" }).tensorlensNode = other);
  };

  const flows = (side, title, edges, end, limit, state) => {
    const shown = edges.filter((edge) => isShown(state, edge, limit)).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    const lines = shown.slice(0, SHOWN), left = edges.length - lines.length, node = state.chosen;
    const body = make(make(side, "table", "", { class: "r flows" }), "tbody");
    const line = (first, weight, kind = "") => {
      const row = make(body, "tr", "", { class: kind });
      const cell = make(row, kind ? "th" : "td", typeof first === "string" ? first : "");
      if (typeof first !== "string") make(cell, "button", `${first.name} at ${first.at}`, { type: "button", class: "go" }).tensorlensNode = first;
      make(row, "td", weight);
    };
    line(`${title}: ${edges.length}`, "", "head");
    lines.forEach((edge) => line(edge[end], digits(edge.weight)));
    if (left) line(`${left} smaller`, digits(total(edges) - total(lines)));
    if (!edges.length) return;
    const rest = end === "to" || node.members ? 0 : node.weight - node.bias - total(edges);
    if (end === "from" && node.bias) line("own bias", digits(node.bias)); // with all inputs it is the node's weight
    if (Math.abs(rest) > 1e-6 * state.largest) line("not in this picture", digits(rest));
    line("sum", digits(end === "to" || node.members ? total(edges) : node.weight), "sum");
  };

  // ------------------------------------------------------------------ what is done

  const choose = (state, node) => {
    state.chosen = node;
    show(state);
  };

  const go = (state, node) => {
    node = holder(node);
    state.svg.querySelectorAll('.t[tabindex="0"]').forEach((mark) => mark.setAttribute("tabindex", -1));
    node.mark.setAttribute("tabindex", 0);
    choose(state, node);
    node.mark.focus({ preventScroll: true });
    node.mark.scrollIntoView({ block: "nearest", inline: "nearest" });
  };

  const pin = (state) => {
    if (!state.pinned.delete(state.chosen)) state.pinned.add(state.chosen);
    show(state);
  };

  const join = (state) => {
    const members = [...state.pinned], name = state.graph.querySelector(".name").value.trim() || `group of ${members.length}`;
    const mean = (key) => members.reduce((sum, node) => sum + node[key], 0) / members.length;
    const [x, y, weight] = [mean("x"), mean("y"), null]; // what passes through two members would count twice
    const label = `${name}: ${members.map((node) => `${node.name} at ${node.at}`).join(", ")}`;
    const mark = make(state.svg, "g", "", { class: "t", tabindex: -1, "aria-label": label });
    dress(mark);
    make(mark, "rect", "", { x: x - 12, y: y - 8, width: 24, height: 16, rx: 5 });
    make(mark, "text", name, { x, y: y - 13, "text-anchor": "middle" });
    const group = { mark, name, at: `${members.length} places`, weight, bias: 0, x, y, parent: null, members };
    members.forEach((node) => { node.parent = group; });
    state.nodes.push(group);
    state.pinned.clear();
    state.graph.querySelector(".name").value = "";
    resum(state);
    go(state, group);
  };

  const part = (state) => {
    const group = state.chosen;
    group.members.forEach((node) => { node.parent = null; state.pinned.add(node); });
    state.pinned.delete(group);
    state.nodes.splice(state.nodes.indexOf(group), 1);
    group.mark.remove();
    resum(state);
    go(state, group.members[0]);
  };

  const resum = (state) => { // edges between the same two ends, of which one is a group, as one
    state.sums.forEach((edge) => edge.path.remove());
    const summed = new Map();
    for (const edge of state.edges) {
      const from = holder(edge.from), to = holder(edge.to);
      if (from === to || (from === edge.from && to === edge.to)) continue;
      const ends = summed.get(from) ?? summed.set(from, new Map()).get(from);
      ends.set(to, (ends.get(to) ?? 0) + edge.weight);
    }
    state.sums = [...summed].flatMap(([from, ends]) => [...ends].map(([to, weight]) => ({ from, to, weight })));
    const first = state.nodes[0].mark;
    for (const edge of state.sums) {
      const { from: a, to: b, weight } = edge, middle = (a.y + b.y) / 2, size = Math.min(1, Math.abs(weight) / state.largest);
      edge.path = make(state.svg, "path", "", {
        d: `M${a.x} ${a.y}C${a.x} ${middle} ${b.x} ${middle} ${b.x} ${b.y}`, fill: "none", "stroke-opacity": 0.55,
        class: weight >= 0 ? "adds" : "takes", "stroke-width": (0.7 + 6 * size).toFixed(1),
      });
      state.svg.insertBefore(edge.path, first);
    }
  };

  // ------------------------------------------------------------------ by pointer and keyboard

  const strongest = (state, node, end) => {
    const limit = least(state), other = end === "to" ? "from" : "to";
    const edges = kept(state).filter((edge) => edge[other] === node && isShown(state, edge, limit));
    return edges.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight))[0]?.[end];
  };

  document.addEventListener("click", (event) => {
    const state = stateOf(event.target);
    if (!state) return;
    const mark = event.target.closest(".t"), button = event.target.closest("button");
    if (mark) choose(state, state.chosen?.mark === mark ? null : nodeOf(state, mark));
    else if (button?.tensorlensNode) go(state, button.tensorlensNode);
    else if (button?.matches(".pin")) pin(state);
    else if (button?.matches(".join")) join(state);
    else if (button?.matches(".part")) part(state);
    else if (event.target.closest("svg")) choose(state, null);
  });

  document.addEventListener("input", (event) => {
    const state = stateOf(event.target);
    if (!state || !event.target.matches(".least, .find")) return;
    state.sought = state.graph.querySelector(".find").value.trim().toLowerCase();
    show(state);
  });

  document.addEventListener("keydown", (event) => {
    const state = stateOf(event.target);
    if (!state || event.ctrlKey || event.metaKey || event.altKey) return;
    const mark = event.target.closest(".t");
    const act = () => {
      if (event.key === "Escape") return choose(state, null), true;
      if (event.target.matches(".find") && event.key === "Enter") {
        const found = state.nodes.filter((node) => !node.parent && node.mark.matches(".found"));
        if (found.length) go(state, found[(found.indexOf(state.chosen) + 1) % found.length]), event.target.focus();
        return true;
      }
      if (event.target.matches(".name") && event.key === "Enter") return state.pinned.size > 1 && join(state), true;
      if (!mark) return false;
      const node = nodeOf(state, mark);
      if (event.key === "Enter" || event.key === " ") return choose(state, state.chosen === node ? null : node), true;
      if (event.key === "p" || event.key === "P") return choose(state, node), pin(state), true;
      const next = { ArrowUp: "to", ArrowDown: "from" }[event.key];
      const other = next && strongest(state, node, next);
      if (other) go(state, other);
      return Boolean(next);
    };
    if (act()) event.preventDefault();
  }, true);

  const start = () => document.querySelectorAll(".tlens .circuit").forEach(stateOf);
  document.addEventListener("pointerover", (event) => stateOf(event.target));
  document.addEventListener("focusin", (event) => stateOf(event.target));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
