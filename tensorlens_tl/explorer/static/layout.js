// Where the nodes of a graph stand: columns are positions of the prompt, rows are layers from below, the target on top.
const HIGH = 22;
const LETTER = 6.6;
const APART = 4;
const SIDE = 72;
const BETWEEN = 8;

function level(node) {
  if (node.kind === "target") return 1e6;
  if (node.kind === "others") return -2;
  if (node.layer < 0) return node.kind === "bias" ? 9e5 : -1;
  return 2 * node.layer + (["mlp", "neuron", "bias", "feature", "error"].includes(node.kind) ? 1 : 0);
}

function levelName(at) {
  if (at === 1e6) return "answer";
  if (at === 9e5) return "final norm";
  if (at < 0) return at === -2 ? "others" : "embedding";
  return `L${Math.floor(at / 2)} ${at % 2 ? "MLP" : "heads"}`;
}

export const shortName = (node) => {
  if (node.kind === "bias") return node.name.replace(/^L\d+\./, "");
  return { embed: "token", pos_embed: "place", target: "answer" }[node.name] ?? node.name;
};

// The nodes of a cell in lines no wider than so much, unless a single node is.
function lines(nodes, most) {
  const rows = [];
  for (const node of nodes) {
    node.wide = Math.round(LETTER * shortName(node).length + 14);
    const last = rows.at(-1);
    if (last && last.wide + APART + node.wide <= most) { last.nodes.push(node); last.wide += APART + node.wide; } else rows.push({ nodes: [node], wide: node.wide });
  }
  return rows;
}

// Columns become narrower, and their cells higher, until the drawing is no wider than so much; one that never fits scrolls.
export function layout(nodes, width) {
  for (const most of [260, 190, 130, 90, 60]) {
    const place = placed(nodes, most);
    if (place.width <= width) return place;
  }
  return placed(nodes, 130);
}

// Each node with x, y (its middle), the columns with their middle and token, the rows with their name and y.
function placed(nodes, most) {
  const positions = [...new Set(nodes.map((node) => node.pos))].sort((a, b) => a - b);
  const levels = [...new Set(nodes.map(level))].sort((a, b) => b - a);
  const cells = new Map(levels.map((at) => [at, positions.map((pos) => lines(nodes.filter((node) => node.pos === pos && level(node) === at), most))]));
  const columns = [];
  let x = SIDE;
  positions.forEach((pos, number) => {
    const width = BETWEEN + Math.max(...levels.flatMap((at) => cells.get(at)[number].map((line) => line.wide)));
    columns.push({ pos, token: nodes.find((node) => node.pos === pos).token, left: x, width, x: x + width / 2 });
    x += width;
  });
  const rows = [];
  let y = 8;
  for (const at of levels) {
    const high = Math.max(...cells.get(at).map((of) => of.length)) * (HIGH + APART);
    rows.push({ name: levelName(at), y: y + high / 2, top: y - 9, high: high + 18 });
    cells.get(at).forEach((of, number) => of.forEach((line, below) => {
      let left = columns[number].x - line.wide / 2;
      for (const node of line.nodes) {
        node.x = left + node.wide / 2;
        node.y = y + (high - of.length * (HIGH + APART)) / 2 + below * (HIGH + APART) + (HIGH + APART) / 2;
        left += node.wide + APART;
      }
    }));
    y += high + 18;
  }
  return { columns, rows, width: x + 4, height: y + 18, high: HIGH };
}
