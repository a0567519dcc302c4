// A graph that answers: hide small edges, choose a node, pin, group, search, save. What has no edge left goes, and the
// rest is laid out again. The picture is complete without it. Listeners sit on the document, once for all graphs on a
// page; each graph's state hangs on its element.
(() => {
  if (window.tensorlensGraphs) return;
  window.tensorlensGraphs = true;
  document.documentElement.classList.add("tensorlens-live");
  const SHOWN = 40; // lines of a list; the others are one more
  // pixels, as in drawing/graphs.py
  const SPACING = 52, ROW = 58, MARGIN = 40, LETTERS = 12, LETTER = 6.5, COLUMN = 66, KEY_WIDTH = 92, KEY_HEIGHT = 18;
  const BESIDE = { queries: -7, keys: 7, gate: 14 };
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
      const { name, at, token, weight, bias, level, layer, kind } = mark.dataset;
      return {
        mark, name, at: at === undefined ? "" : `${at} “${token}”`, column: Number(at ?? 0), parent: null, kind,
        weight: weight === undefined ? null : Number(weight), bias: Number(bias ?? 0), level: Number(level), layer: Number(layer),
      };
    });
    const edges = [...svg.querySelectorAll("path[data-e]")].map((path) => {
      const [from, to, weight] = path.dataset.e.split(" ").map(Number);
      return { path, from: nodes[from], to: nodes[to], weight, reads: path.dataset.reads };
    });
    const state = { graph, svg, nodes, edges, sums: [], pinned: new Set(), chosen: null, sought: "", layers: [] };
    state.columns = [...svg.querySelectorAll(".column")];
    state.keys = svg.querySelectorAll(".key text").length;
    state.dashes = new Map(edges.map((edge) => [edge.reads, edge.path.getAttribute("stroke-dasharray") ?? ""]));
    state.weighted = nodes.some((node) => node.weight !== null);
    state.largest = Math.max(...edges.map((edge) => Math.abs(edge.weight)));
    nodes.forEach((node) => dress(node.mark));
    show(state);
    return state;
  };
  const called = (node) => (node.at ? `${node.name} at ${node.at}` : node.name);
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
    const reached = new Set([state.chosen, ...state.pinned, state.nodes.find((node) => node.kind === "target")]);
    for (const edge of [...state.edges, ...state.sums]) {
      edge.path.toggleAttribute("hidden", !shown.has(edge));
      edge.path.classList.toggle("on", edge.from === state.chosen || edge.to === state.chosen);
      if (shown.has(edge)) reached.add(edge.from).add(edge.to);
    }
    state.svg.classList.toggle("picked", state.chosen !== null);
    state.svg.classList.toggle("sought", state.sought !== "");
    let found = 0, idle = 0;
    for (const node of state.nodes) {
      const fits = state.sought !== "" && `${node.name} ${node.at}`.toLowerCase().includes(state.sought);
      const seen = node.parent === null && reached.has(node);
      found += fits && seen;
      idle += fits && !seen && node.parent === null;
      node.mark.toggleAttribute("hidden", !seen);
      node.mark.setAttribute("aria-pressed", node === state.chosen);
      node.mark.classList.toggle("pinned", state.pinned.has(node));
      node.mark.classList.toggle("found", fits);
    }
    if (!state.svg.querySelector('.t[tabindex="0"]:not([hidden])')) state.svg.querySelector(".t:not([hidden])").setAttribute("tabindex", 0);
    place(state, state.nodes.filter((node) => !node.mark.hasAttribute("hidden")), shown);
    const tool = (name) => state.graph.querySelector(`.${name}`);
    const share = ((tool("least").value / 100) ** 2 * 100).toPrecision(2);
    tool("least").setAttribute("aria-valuetext", `below ${share} percent of the largest; ${shown.size} of ${all.length} edges shown`);
    tool("count").textContent = `${Number(share)} % of the largest: ${shown.size} of ${all.length} shown`;
    tool("hits").textContent = state.sought === "" ? "" : `${found} found${idle ? `, ${idle} hidden` : ""}`;
    tool("pin").disabled = state.chosen === null;
    tool("pin").setAttribute("aria-pressed", state.pinned.has(state.chosen));
    tool("join").disabled = state.pinned.size < 2;
    tool("part").hidden = !state.chosen?.members || state.layers.includes(state.chosen);
    list(state, all, limit);
  };

  // where each node that is shown stands: a column per position, a row per layer and kind, as drawing/graphs.py does it
  const place = (state, nodes, edges) => {
    const rows = [...new Set(nodes.map((node) => node.level))].sort((a, b) => a - b);
    const cells = new Map();
    for (const node of nodes) {
      const column = cells.get(node.column) ?? cells.set(node.column, new Map()).get(node.column);
      (column.get(node.level) ?? column.set(node.level, []).get(node.level)).push(node);
    }
    const room = state.keys ? KEY_HEIGHT : 0, height = ROW * rows.length + MARGIN + room;
    const longest = Math.max(...nodes.map((node) => [...node.name].length));
    const spacing = Math.max(SPACING, LETTER * Math.min(LETTERS, longest));
    let start = MARGIN;
    const middles = new Map();
    for (const column of [...cells.keys()].sort((a, b) => a - b)) {
      const levels = [...cells.get(column).values()];
      const width = Math.max(COLUMN, spacing * (Math.max(...levels.map((cell) => cell.length)) + 1));
      for (const cell of levels) cell.forEach((node, number) => {
        node.x = start + (width * (number + 1)) / (cell.length + 1);
        node.y = height - MARGIN - ROW * rows.indexOf(node.level);
      });
      middles.set(column, start + width / 2);
      start += width;
    }
    nodes.forEach(move);
    edges.forEach((edge) => edge.path.setAttribute("d", way(edge)));
    for (const label of state.columns) {
      const middle = middles.get(Number(label.dataset.at));
      const grouped = Boolean(state.overTokens) && state.layers.some((group) => group.column === Number(label.dataset.at));
      label.toggleAttribute("hidden", middle === undefined || grouped); // undefined would turn it over
      if (middle !== undefined) set(label, { x: middle, y: height - 8 });
    }
    const width = Math.max(start + MARGIN, state.keys * KEY_WIDTH);
    set(state.svg, { width, height, viewBox: `0 0 ${width} ${height}` });
  };
  const set = (element, attributes) => Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  const move = ({ mark, x, y }) => {
    const [circle, box] = [mark.querySelector("circle"), mark.querySelector("rect")];
    if (circle) set(circle, { cx: x, cy: y });
    if (box) set(box, { x: x - 12, y: y - 8 });
    set(mark.querySelector("text"), { x, y: y - 13 });
  };
  const way = ({ from, to, reads }) => {
    const middle = (from.y + to.y) / 2, end = to.x + (to.at ? 0 : (BESIDE[reads] ?? 0)), rise = from.y - to.y;
    const bow = Math.abs(from.x - to.x) < 1 && rise > 1.5 * ROW ? Math.min(60, 0.2 * rise) : 0; // past what is between
    return `M${from.x} ${from.y}C${from.x + bow} ${middle} ${end + bow} ${middle} ${end} ${to.y}`;
  };

  const list = (state, all, limit) => {
    const side = state.graph.querySelector(".side"), node = state.chosen;
    side.replaceChildren();
    if (node === null) make(side, "p", "Click a node, or press Enter on it, for its inputs and outputs. Arrow keys move; P pins, Escape lets go.", { class: "n" });
    else {
      make(side, "div", called(node), { class: "title" });
      if (!node.members && state.weighted) make(side, "div", `${digits(node.weight)} to the target`, { class: "n" });
      if (node.members) make(side, "div", node.members.map(called).join(", "), { class: "n" });
      flows(side, "Inputs", all.filter((edge) => edge.to === node), "from", limit, state);
      flows(side, "Outputs", all.filter((edge) => edge.from === node), "to", limit, state);
    }
    if (!state.pinned.size) return;
    const pinned = make(side, "div", "Pinned: ", { class: "n" });
    state.pinned.forEach((other) => make(pinned, "button", called(other), { type: "button", class: "go" }).tensorlensNode = other);
  };

  const flows = (side, title, edges, end, limit, state) => {
    const shown = edges.filter((edge) => isShown(state, edge, limit)).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    const lines = shown.slice(0, SHOWN), left = edges.length - lines.length, node = state.chosen;
    const body = make(make(side, "table", "", { class: "r flows" }), "tbody");
    const apart = state.keys > 0;
    const line = (first, weight, kind = "", reads = "") => {
      const row = make(body, "tr", "", { class: kind });
      const cell = make(row, kind ? "th" : "td", typeof first === "string" ? first : "");
      if (typeof first !== "string") make(cell, "button", called(first), { type: "button", class: "go" }).tensorlensNode = first;
      if (reads) make(cell, "span", ` ${reads}`, { class: "n" });
      make(row, "td", weight);
    };
    line(`${title}: ${edges.length}`, "", "head");
    lines.forEach((edge) => line(edge[end], digits(edge.weight), "", apart ? edge.reads : ""));
    if (left) line(`${left} smaller`, digits(total(edges) - total(lines)));
    if (!edges.length || !state.weighted) return; // scores of edges between parts without a weight do not add up to one
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
    const group = gather(state, members, name);
    state.pinned.clear();
    state.graph.querySelector(".name").value = "";
    resum(state);
    go(state, group);
  };

  // a group stands where the last of its members does; what passes through two of them would count twice in a weight
  const gather = (state, members, name) => {
    const most = (key) => Math.max(...members.map((node) => node[key]));
    const mark = make(state.svg, "g", "", { class: "t", tabindex: -1, "aria-label": `${name}: ${members.map(called).join(", ")}` });
    dress(mark);
    make(mark, "rect", "", { width: 24, height: 16, rx: 5 });
    make(mark, "text", name, { "text-anchor": "middle" });
    const group = { mark, name, at: `${members.length} places`, weight: null, bias: 0, parent: null, members, kind: "group" };
    Object.assign(group, { column: most("column"), level: most("level"), layer: most("layer") });
    members.forEach((node) => { node.parent = group; });
    state.nodes.push(group);
    return group;
  };

  const scatter = (state, group) => {
    group.members.forEach((node) => { node.parent = null; });
    state.pinned.delete(group);
    state.nodes.splice(state.nodes.indexOf(group), 1);
    group.mark.remove();
  };

  const part = (state) => {
    const group = state.chosen;
    scatter(state, group);
    group.members.forEach((node) => state.pinned.add(node));
    resum(state);
    go(state, group.members[0]);
  };

  const byLayer = (state, by) => {
    state.layers.forEach((group) => scatter(state, group));
    const layers = new Map();
    for (const node of state.nodes) {
      if (by === "" || node.parent || node.kind === "target" || state.pinned.has(node)) continue;
      const last = node.kind === "bias" && node.layer < 0;
      const name = last ? "final norm" : node.layer < 0 ? "embeddings" : `layer ${node.layer}`;
      const key = by === "layer" ? name : `${name} ${node.column}`;
      (layers.get(key) ?? layers.set(key, { name, members: [] }).get(key)).members.push(node);
    }
    state.layers = [...layers.values()].map(({ name, members }) => gather(state, members, name));
    const column = Math.max(...state.nodes.map((node) => node.column));
    state.overTokens = by === "layer";
    state.layers.forEach((group) => {
      if (by === "layer") group.column = column;
      else group.at = group.members[0].at;
    });
    state.chosen = null;
    resum(state);
    show(state);
  };

  const resum = (state) => { // edges between the same two ends, of which one is a group, as one
    state.sums.forEach((edge) => edge.path.remove());
    const summed = new Map();
    for (const edge of state.edges) {
      const from = holder(edge.from), to = holder(edge.to);
      if (from === to || (from === edge.from && to === edge.to)) continue;
      const reads = to.members ? "" : edge.reads, inner = (map, key) => map.get(key) ?? map.set(key, new Map()).get(key);
      const ends = inner(inner(summed, from), to);
      ends.set(reads, (ends.get(reads) ?? 0) + edge.weight);
    }
    state.sums = [...summed].flatMap(([from, ends]) => [...ends].flatMap(([to, kinds]) => [...kinds].map(([reads, weight]) => ({ from, to, reads, weight }))));
    const first = state.nodes[0].mark;
    for (const edge of state.sums) {
      const size = Math.min(1, Math.abs(edge.weight) / state.largest);
      edge.path = make(state.svg, "path", "", {
        fill: "none", "stroke-opacity": 0.55, class: edge.weight >= 0 ? "adds" : "takes", "stroke-width": (0.7 + 6 * size).toFixed(1),
        "stroke-dasharray": state.dashes.get(edge.reads) ?? "",
      });
      state.svg.insertBefore(edge.path, first);
    }
  };

  // ------------------------------------------------------------------ as a file

  // what is seen, black on white and with its colours written out, as a file of its own
  const drawn = (state) => {
    const copy = state.svg.cloneNode(true), { width, height } = state.svg.viewBox.baseVal;
    const [blue, orange] = ["--blue", "--orange"].map((name) => `rgb(${getComputedStyle(state.graph).getPropertyValue(name)})`);
    copy.querySelectorAll("[hidden]").forEach((element) => element.remove());
    copy.querySelectorAll(".adds").forEach((path) => path.setAttribute("stroke", blue));
    copy.querySelectorAll(".takes").forEach((path) => path.setAttribute("stroke", orange));
    copy.querySelectorAll("rect").forEach((box) => set(box, { stroke: blue, fill: "white", "stroke-width": 2 }));
    copy.querySelectorAll("*").forEach((element) => {
      for (const { name } of [...element.attributes]) if (/^(aria-|data-|role$|tabindex$|class$)/.test(name)) element.removeAttribute(name);
    });
    set(copy, { viewBox: `0 0 ${width} ${height}` });
    ["class", "aria-label", "role"].forEach((name) => copy.removeAttribute(name));
    const style = document.createElementNS(copy.namespaceURI, "style");
    style.textContent = "svg{color:black;background:white}text{font:11px sans-serif;fill:black;paint-order:stroke;stroke:white;stroke-width:3px;stroke-linejoin:round}";
    copy.prepend(style);
    return new XMLSerializer().serializeToString(copy);
  };

  const saved = (href, kind) => {
    const name = document.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "graph";
    const link = document.createElement("a");
    Object.assign(link, { href, download: `${name}.${kind}` });
    link.click();
  };

  const saveSvg = (state) => saved(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn(state))}`, "svg");

  const savePng = (state) => {
    const picture = new Image(), { width, height } = state.svg.viewBox.baseVal;
    picture.onload = () => {
      const canvas = document.createElement("canvas"), scale = Math.min(3, 12000 / width, 12000 / height);
      Object.assign(canvas, { width: Math.round(scale * width), height: Math.round(scale * height) });
      const pen = canvas.getContext("2d");
      pen.fillStyle = "white";
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
      saved(canvas.toDataURL("image/png"), "png");
    };
    picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn(state))}`;
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
    else if (button?.matches(".svg")) saveSvg(state);
    else if (button?.matches(".png")) savePng(state);
    else if (event.target.closest("svg")) choose(state, null);
  });

  document.addEventListener("input", (event) => {
    const state = stateOf(event.target);
    if (state && event.target.matches(".by")) byLayer(state, event.target.value);
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
        const found = state.nodes.filter((node) => node.mark.matches(".found:not([hidden])"));
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
