// A graph that answers: hide small edges, choose a node, pin, group, search, save. What has no edge left goes, and the
// rest is laid out again. The picture is complete without it. Listeners sit on the document, once for all graphs on a
// page; each graph's state hangs on its element.
(() => {
  if (window.tensorlensGraphs) return;
  window.tensorlensGraphs = {}; // what a page calls: `select` a node by its key, `arrange` pins and groups as a text says, `svg` for what is drawn
  document.documentElement.classList.add("tensorlens-live");
  const SHOWN = 40, FEW = 8; // lines of a list, at most and however small they are; the others are one more
  // pixels, as in drawing/graphs.py
  const HIGH = 22, APART = 4, BETWEEN = 8, SIDE = 76, MARGIN = 8, LETTER = 6.6, WIDE = 900, CELLS = [260, 190, 130, 90, 60], BENT = 60, KEY_WIDTH = 92, KEY_HEIGHT = 18, BAND = 18, BOWED = 40;
  const BESIDE = { queries: -7, keys: 7, gate: 14 };
  const states = new WeakMap();
  // four digits, and of numbers that stand together as many decimals as the largest has
  const digits = (value, most = value) => {
    const size = Math.abs(most), decimals = size > 0 ? Math.min(8, Math.max(0, 3 - Math.floor(Math.log10(size)))) : 0;
    return (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(decimals);
  };
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
      const { name, at, column, row, token, weight, bias, level, layer, kind } = mark.dataset;
      return {
        mark, name, at: at === undefined || kind === "others" ? "" : `${at} “${token}”`, column: Number(column), row, parent: null, kind,
        weight: weight === undefined ? null : Number(weight), bias: Number(bias ?? 0), level: Number(level), layer: Number(layer),
      };
    });
    const edges = [...svg.querySelectorAll("path[data-e]")].map((path) => {
      const [from, to, weight] = path.dataset.e.split(" ").map(Number);
      return { path, from: nodes[from], to: nodes[to], weight, reads: path.dataset.reads };
    });
    const state = { graph, svg, nodes, edges, sums: [], pinned: new Set(), chosen: null, sought: "", layers: [], groups: 0, zoom: 1 };
    state.shell = svg.parentElement;
    state.columns = [...svg.querySelectorAll(".column")];
    svg.querySelectorAll("text.row").forEach((label) => label.remove());
    state.rows = make(svg, "g", "", { class: "rows" });
    if (state.columns.length) svg.append(state.columns[0].parentElement); // the headings lie on a band, on top of nodes
    state.bands = [state.rows, ...state.columns.slice(0, 1).map((label) => label.parentElement)].map((group) => group.insertBefore(make(group, "rect", "", { class: "band" }), group.firstChild));
    state.target = nodes.find((node) => node.kind === "target") ?? nodes.at(-1);
    state.whole = "shown" in graph.dataset;
    state.keys = svg.querySelectorAll(".key text").length;
    state.dashes = new Map(edges.map((edge) => [edge.reads, edge.path.getAttribute("stroke-dasharray") ?? ""]));
    state.weighted = nodes.some((node) => node.weight !== null);
    state.largest = Math.max(...edges.map((edge) => Math.abs(edge.weight)));
    nodes.forEach((node) => dress(node.mark));
    state.shell.addEventListener("scroll", () => keepTokens(state));
    new ResizeObserver(() => {
      if (state.seen !== state.shell.offsetWidth) reveal(state, true); // a panel beside it opened or closed, and at first
      keepTokens(state);
    }).observe(state.shell);
    if (state.whole) { // so many edges at first
      const sizes = edges.map((edge) => Math.abs(edge.weight)).sort((a, b) => b - a), least = sizes[Math.min(Number(graph.dataset.shown), sizes.length) - 1];
      graph.querySelector(".least").value = Math.floor(100 * Math.sqrt(least / state.largest));
    }
    show(state);
    return state;
  };
  const called = ({ name, at, kind }) => (kind === "target" ? "answer" : name) + (at && ` at ${at}`);
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
    const reached = new Set([state.chosen, ...state.pinned, state.target, ...(state.whole ? state.nodes : [])]);
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
    let places;
    for (const cell of [...CELLS, CELLS[2]]) {
      places = laidOut(state, nodes, cell);
      if (places.width <= WIDE) break;
    }
    nodes.forEach(move);
    edges.forEach((edge) => edge.path.setAttribute("d", way(edge)));
    for (const label of state.columns) {
      const x = places.columns.get(Number(label.dataset.column));
      const grouped = Boolean(state.overTokens) && state.layers.some((group) => group.column === Number(label.dataset.column));
      label.toggleAttribute("hidden", x === undefined || grouped); // undefined would turn it over
      if (x !== undefined) set(label, { x, y: places.height - 8 });
    }
    state.rows.querySelectorAll("text").forEach((label) => label.remove());
    for (const [name, y] of places.rows) make(state.rows, "text", name, { class: "row", x: 4, y: y + 4 });
    state.size = [Math.max(places.width, state.keys * KEY_WIDTH), places.height];
    const top = state.keys ? KEY_HEIGHT : 0;
    set(state.bands[0], { y: top, width: SIDE - MARGIN, height: places.height - top });
    if (state.bands[1]) set(state.bands[1], { y: places.height - BAND, width: state.size[0], height: BAND });
    scale(state, state.zoom);
  };
  const wide = (line) => line.reduce((sum, node) => sum + node.wide + APART, -APART);
  const laidOut = (state, nodes, cell) => {
    const lines = new Map(), columns = new Map(), rows = [], inner = (map, key, empty) => map.get(key) ?? map.set(key, empty()).get(key);
    for (const node of nodes) {
      node.wide = Math.ceil(LETTER * [...node.mark.querySelector("text").textContent].length + 14);
      const ofCell = inner(inner(lines, node.level, () => new Map()), node.column, () => []), last = ofCell.at(-1);
      if (last && wide([...last, node]) <= cell) last.push(node); else ofCell.push([node]);
    }
    const spare = state.overTokens ? BOWED : 0; // edges of a single column bow beyond its nodes
    let x = SIDE + spare, y = MARGIN + (state.keys ? KEY_HEIGHT : 0);
    for (const column of [...new Set(nodes.map((node) => node.column))].sort((a, b) => a - b)) {
      const most = Math.max(...[...lines.values()].flatMap((cells) => (cells.get(column) ?? []).map(wide)));
      columns.set(column, x + (MARGIN + most) / 2);
      x += MARGIN + most;
    }
    for (const level of [...lines.keys()].sort((a, b) => b - a)) {
      const cells = lines.get(level), high = Math.max(...[...cells.values()].map((of) => of.length)) * (HIGH + APART);
      rows.push([[...cells.values()].at(-1)[0].at(-1).row ?? "", y + high / 2]);
      for (const [column, ofCell] of cells) {
        ofCell.forEach((line, number) => {
          let left = columns.get(column) - wide(line) / 2;
          for (const node of line) {
            node.x = left + node.wide / 2;
            node.y = y + (high - ofCell.length * (HIGH + APART)) / 2 + (number + 0.5) * (HIGH + APART);
            left += node.wide + APART;
          }
        });
      }
      y += high + BETWEEN;
    }
    return { columns, rows, width: x + MARGIN + spare, height: y + BETWEEN };
  };
  const set = (element, attributes) => Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  const move = ({ mark, x, y, wide: width }) => {
    mark.querySelectorAll("rect").forEach((box) => set(box, { x: x - width / 2, y: y - HIGH / 2, width, height: HIGH }));
    set(mark.querySelector("text"), { x, y: y + 4 });
  };
  const way = ({ from, to, reads, weight }) => {
    const end = to.x + (to.at || from.at ? 0 : (BESIDE[reads] ?? 0)), y0 = from.y - HIGH / 2, y1 = to.y + HIGH / 2, bend = Math.max(12, (y0 - y1) / 2);
    // edges of one column bow: to the right what adds, to the left what takes away
    const bow = Math.abs(from.x - to.x) < HIGH && y0 - y1 > BENT ? Math.min(90, 10 + 0.12 * (y0 - y1)) * (weight >= 0 ? 1 : -1) : 0;
    return `M${from.x} ${y0}C${from.x + bow} ${y0 - bend} ${end + bow} ${y1 + bend} ${end} ${y1}`;
  };

  // ------------------------------------------------------------------ zoom and pan

  const scale = (state, zoom) => {
    const [width, height] = state.size;
    state.zoom = Math.min(4, Math.max(0.1, zoom));
    set(state.svg, { width: width * state.zoom, height: height * state.zoom, viewBox: `0 0 ${width} ${height}` });
    keepTokens(state);
  };
  const scrolled = ({ shell, svg }) => shell.getBoundingClientRect().left - svg.getBoundingClientRect().left; // a report begins at its right end, where scrollLeft is 0
  const keepTokens = (state) => { // the prompt and the names of rows stay in view
    const hidden = state.size[1] - (state.shell.scrollTop + state.shell.clientHeight) / state.zoom;
    state.svg.querySelector(".columns")?.setAttribute("transform", `translate(0 ${-Math.max(0, hidden)})`);
    state.rows.setAttribute("transform", `translate(${Math.max(0, scrolled(state)) / state.zoom} 0)`);
  };
  // scrolls the picture, not the page, to the chosen node, or to the answer
  const reveal = (state, always) => {
    const { shell, zoom } = state, node = state.chosen ?? state.target;
    const right = node.x * zoom - scrolled(state), down = node.y * zoom - shell.scrollTop;
    const isSeen = right > SIDE * zoom + HIGH && right < shell.clientWidth - 2 * HIGH && down > HIGH && down < shell.clientHeight - 2 * HIGH;
    if (always || !isSeen) shell.scrollBy(right - shell.clientWidth / 2, down - shell.clientHeight / 2);
    state.seen = shell.offsetWidth;
  };
  const fit = (state) => scale(state, Math.min(1, state.shell.clientWidth / state.size[0]));

  const list = (state, all, limit) => {
    const side = state.graph.querySelector(".side"), node = state.chosen ?? (state.weighted ? state.target : null);
    side.replaceChildren();
    if (state.chosen === null) make(side, "p", "Blue adds, orange takes away. Click a node, or press Enter on it, for its inputs and outputs. Arrow keys move; P pins, Escape lets go. Drag to move the picture.", { class: "n" });
    if (node) {
      make(side, "div", called(node), { class: "title" });
      if (!node.members && state.weighted) make(side, "div", `${digits(node.weight)} ${node === state.target ? "in all" : "to the answer, on all ways from here"}`, { class: "n" });
      if (node.live !== undefined) make(side, "div", `${digits(node.live)} lost when patched live`, { class: "n" });
      if (node.members) make(side, "div", `${node.members.map(called).join(", ")}. A group has no number and no colour: an effect that passes through two of its nodes would count twice.`, { class: "n" });
      flows(side, "Inputs", all.filter((edge) => edge.to === node), "from", limit, state, node);
      flows(side, "Outputs", all.filter((edge) => edge.from === node), "to", limit, state, node);
    }
    if (!state.pinned.size) return;
    const pinned = make(side, "div", "Pinned: ", { class: "n" });
    state.pinned.forEach((other) => make(pinned, "button", called(other), { type: "button", class: "go" }).tensorlensNode = other);
  };

  const flows = (side, title, edges, end, limit, state, node) => {
    if (!edges.length) return;
    const shown = [...edges].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).filter((edge, place) => place < FEW || isShown(state, edge, limit));
    const lines = shown.slice(0, SHOWN), left = edges.length - lines.length;
    const body = make(make(side, "table", "", { class: "r flows" }), "tbody");
    const apart = state.keys > 0, most = Math.max(...edges.map((edge) => Math.abs(edge.weight)), Math.abs(node.weight ?? 0));
    const line = (first, weight, kind = "", reads = "") => {
      const row = make(body, "tr", "", { class: kind });
      const cell = make(row, kind ? "th" : "td", typeof first === "string" ? first : "");
      if (typeof first !== "string") make(cell, "button", called(first), { type: "button", class: "go" }).tensorlensNode = first;
      if (reads) make(cell, "span", ` ${reads}`, { class: "n" });
      make(row, "td", typeof weight === "number" ? digits(weight, most) : weight, { title: weight });
    };
    line(`${title}: ${edges.length}`, "", "heading");
    lines.forEach((edge) => line(edge[end], edge.weight, "", apart ? edge.reads : ""));
    if (left) line(`${left} smaller`, total(edges) - total(lines));
    if (!edges.length || !state.weighted) return; // scores of edges between parts without a weight do not add up to one
    const rest = node.members || (end === "to" && node.kind === "others") ? 0 : node.weight - (end === "from" ? node.bias : 0) - total(edges);
    if (end === "from" && node.bias) line("own bias", node.bias); // with all inputs it is the node's weight
    if (Math.abs(rest) > 1e-6 * state.largest) line(end === "from" ? "not in this picture" : "to what is not drawn", rest);
    line("sum", total(edges) + rest + (end === "from" ? node.bias : 0), "sum");
  };

  // ------------------------------------------------------------------ what is done

  const choose = (state, node) => {
    state.chosen = node;
    show(state);
  };
  const keyOf = (node) => node.mark.dataset.node;
  const seenOf = (state) => [state.chosen, arranged(state)];
  const announce = (state, before) => {
    const [chosen, arrangement] = seenOf(state);
    if (chosen === before[0] && arrangement === before[1]) return;
    state.graph.dispatchEvent(new CustomEvent("chosen", { bubbles: true, detail: { node: chosen?.mark.dataset ?? null, arranged: arrangement } }));
  };

  // pins, groups with their names, and layers, as text: a page's link has it
  const arranged = (state) => {
    const groups = state.nodes.filter((node) => node.members && !state.layers.includes(node));
    const by = state.graph.querySelector(".by").value;
    if (!by && !groups.length && !state.pinned.size) return "";
    return JSON.stringify({ by, pinned: [...state.pinned].map(keyOf), groups: groups.map((group) => [keyOf(group), group.mark.querySelector("text").textContent, group.members.map(keyOf)]) });
  };

  // what such a text says, as far as it is about nodes of this graph
  const arrange = (state, text) => {
    if (text === arranged(state)) return;
    const list = (of) => (Array.isArray(of) ? of : []), box = state.graph.querySelector(".by");
    let wanted;
    try { wanted = JSON.parse(text || "{}") ?? {}; } catch { return; }
    const nodesOf = (keys) => [...new Set(list(keys))].map((key) => state.nodes.find((node) => node.parent === null && keyOf(node) === key)).filter(Boolean);
    byLayer(state, "");
    state.nodes.filter((node) => node.members).reverse().forEach((group) => scatter(state, group));
    state.pinned.clear();
    for (const group of list(wanted.groups)) {
      const [key, name, keys] = list(group), members = nodesOf(keys);
      if (!/^#\d{1,6}$/.test(key) || members.length < 2) continue;
      state.groups = Math.max(state.groups, Number(key.slice(1)) + 1);
      gather(state, members, String(name), key);
    }
    nodesOf(wanted.pinned).forEach((node) => state.pinned.add(node));
    box.value = [...box.options].some(({ value }) => value === wanted.by) ? wanted.by : "";
    byLayer(state, box.value);
  };

  window.tensorlensGraphs.select = (graph, key) => {
    const state = stateOf(graph), node = state?.nodes.find((of) => of.mark.dataset.node === key) ?? null;
    if (state && state.chosen !== node) {
      choose(state, node);
      if (node) reveal(state);
    }
    return node !== null;
  };
  window.tensorlensGraphs.arrange = (graph, text) => {
    const state = stateOf(graph);
    if (state) arrange(state, text);
  };
  // what the live model loses with a node patched, by its key, is its outline
  window.tensorlensGraphs.measure = (graph, lost) => {
    const state = stateOf(graph);
    if (!state) return;
    const most = Math.max(...Object.values(lost).map(Math.abs), 1e-30);
    for (const node of state.nodes) {
      const box = node.mark.querySelector("rect:not(.ground)"), title = node.mark.querySelector("title");
      if (!box) continue;
      node.drawn ??= { stroke: box.getAttribute("stroke"), said: title.textContent };
      node.live = lost[keyOf(node)];
      const size = Math.abs(node.live) / most, colour = getComputedStyle(graph).getPropertyValue(node.live < 0 ? "--orange" : "--blue");
      set(box, node.live === undefined ? { stroke: node.drawn.stroke, "stroke-width": 1, "stroke-opacity": 1 } : { stroke: `rgb(${colour})`, "stroke-width": 1.5 + 2.5 * size, "stroke-opacity": 0.25 + 0.75 * size });
      title.textContent = node.drawn.said + (node.live === undefined ? "" : `; patched live: ${digits(node.live)}`);
      node.mark.setAttribute("aria-label", title.textContent);
    }
    show(state);
  };
  window.tensorlensGraphs.svg = (graph) => drawn(stateOf(graph));

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
    const group = gather(state, members, name, `#${state.groups++}`);
    state.pinned.clear();
    state.graph.querySelector(".name").value = "";
    resum(state);
    go(state, group);
  };

  // a group stands where the last of its members does; what passes through two of them would count twice in a weight
  const gather = (state, members, name, key) => {
    const most = (key) => Math.max(...members.map((node) => node[key]));
    const mark = make(state.svg, "g", "", { class: "t", tabindex: -1, "data-node": key, "aria-label": `${name}: ${members.map(called).join(", ")}` });
    dress(mark);
    state.svg.insertBefore(mark, state.rows);
    make(mark, "rect", "", { rx: 4, class: "ground" });
    make(mark, "text", name, { "text-anchor": "middle" });
    const group = { mark, name, at: `${members.length} places`, row: members.at(-1).row, weight: null, bias: 0, parent: null, members, kind: "group" };
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
      if (by === "" || node.parent || ["target", "others"].includes(node.kind) || state.pinned.has(node)) continue;
      const last = node.kind === "bias" && node.layer < 0;
      const name = last ? "final norm" : node.layer < 0 ? "embeddings" : `layer ${node.layer}`;
      const key = by === "layer" ? name : `${name} ${node.column}`;
      (layers.get(key) ?? layers.set(key, { name, members: [] }).get(key)).members.push(node);
    }
    state.layers = [...layers.values()].map(({ name, members }) => gather(state, members, name, by === "layer" ? name : `${name}@${members[0].column}`));
    const column = Math.max(...state.nodes.map((node) => node.column));
    state.overTokens = by === "layer";
    state.layers.forEach((group) => {
      group.row = ""; // it is the node's own name
      group.at = by === "layer" ? "" : group.members[0].at;
      if (by === "layer") group.column = column;
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
        fill: "none", "stroke-opacity": 0.55, class: edge.weight >= 0 ? "adds" : "takes", "stroke-width": (0.7 + 5 * size).toFixed(1),
        "stroke-dasharray": state.dashes.get(edge.reads) ?? "",
      });
      state.svg.insertBefore(edge.path, first);
    }
  };

  // ------------------------------------------------------------------ as a file

  // what is seen, black on white and with its colours written out, as a file of its own
  const drawn = (state) => {
    const copy = state.svg.cloneNode(true), [width, height] = state.size;
    const [blue, orange] = ["--blue", "--orange"].map((name) => `rgb(${getComputedStyle(state.graph).getPropertyValue(name)})`);
    copy.querySelectorAll("[hidden], .band").forEach((element) => element.remove());
    copy.querySelectorAll(".adds").forEach((path) => path.setAttribute("stroke", blue));
    copy.querySelectorAll(".takes").forEach((path) => path.setAttribute("stroke", orange));
    copy.querySelectorAll(".ground").forEach((box) => set(box, { stroke: blue, fill: "white" }));
    copy.querySelectorAll(".columns, .rows").forEach((labels) => labels.removeAttribute("transform"));
    copy.querySelectorAll("*").forEach((element) => {
      for (const { name } of [...element.attributes]) if (/^(aria-|data-|role$|tabindex$|class$)/.test(name)) element.removeAttribute(name);
    });
    set(copy, { width, height, viewBox: `0 0 ${width} ${height}` });
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
    const picture = new Image(), [width, height] = state.size;
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
    const before = seenOf(state);
    if (mark) choose(state, state.chosen?.mark === mark ? null : nodeOf(state, mark));
    else if (button?.tensorlensNode) go(state, button.tensorlensNode);
    else if (button?.matches(".into")) scale(state, 1.25 * state.zoom);
    else if (button?.matches(".out-of")) scale(state, state.zoom / 1.25);
    else if (button?.matches(".fit")) fit(state);
    else if (button?.matches(".pin")) pin(state);
    else if (button?.matches(".join")) join(state);
    else if (button?.matches(".part")) part(state);
    else if (button?.matches(".svg")) saveSvg(state);
    else if (button?.matches(".png")) savePng(state);
    else if (event.target.closest("svg") && !state.moved) choose(state, null);
    announce(state, before);
  });

  document.addEventListener("wheel", (event) => {
    const state = event.ctrlKey && event.target.closest?.(".circuit svg") ? stateOf(event.target) : null;
    if (!state) return;
    event.preventDefault();
    scale(state, state.zoom * (event.deltaY < 0 ? 1.1 : 1 / 1.1));
  }, { passive: false });

  document.addEventListener("pointerdown", (event) => {
    const state = event.button === 0 && event.pointerType === "mouse" && event.target.closest?.(".circuit svg") ? stateOf(event.target) : null;
    if (!state) return;
    const { shell } = state, from = [shell.scrollLeft + event.clientX, shell.scrollTop + event.clientY];
    state.moved = false;
    const drag = (to) => {
      if (Math.hypot(to.clientX - event.clientX, to.clientY - event.clientY) > 4) state.moved = true;
      [shell.scrollLeft, shell.scrollTop] = [from[0] - to.clientX, from[1] - to.clientY];
    };
    document.addEventListener("pointermove", drag);
    document.addEventListener("pointerup", () => document.removeEventListener("pointermove", drag), { once: true });
  });

  document.addEventListener("input", (event) => {
    const state = stateOf(event.target);
    if (!state || !event.target.matches(".least, .find")) return;
    state.sought = state.graph.querySelector(".find").value.trim().toLowerCase();
    show(state);
  });

  document.addEventListener("change", (event) => {
    const state = stateOf(event.target);
    if (!state || !event.target.matches(".by")) return;
    const before = [state.chosen, null];
    byLayer(state, event.target.value);
    announce(state, before);
  });

  document.addEventListener("keydown", (event) => {
    const state = stateOf(event.target);
    if (!state || event.ctrlKey || event.metaKey || event.altKey) return;
    const mark = event.target.closest(".t"), before = seenOf(state);
    const act = () => {
      if (event.key === "Escape") return choose(state, null), true;
      if (event.target.matches(".find") && event.key === "Enter") {
        const found = state.nodes.filter((node) => node.mark.matches(".found:not([hidden])"));
        if (found.length) go(state, found[(found.indexOf(state.chosen) + 1) % found.length]), event.target.focus();
        return true;
      }
      if (event.target.matches(".name") && event.key === "Enter") return state.pinned.size > 1 && (join(state), announce(state, before)), true;
      if (!mark) return false;
      const node = nodeOf(state, mark);
      if (event.key === "Enter" || event.key === " ") return choose(state, state.chosen === node ? null : node), announce(state, before), true;
      if (event.key === "p" || event.key === "P") return choose(state, node), pin(state), announce(state, before), true;
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
