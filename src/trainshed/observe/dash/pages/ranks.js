"use strict";
// The layout, rank by rank: a cell for each, by its place in the mesh or on its node, coloured by what is asked.

const RANK_COLOURS = [
  ["compute_seconds", "Compute time", figures.seconds],
  ["wait_seconds", "Waiting", figures.seconds],
  ["memory_gib", "Memory", figures.gib],
  ["temperature_celsius", "Temperature", (value) => (isKnown(value) ? `${Math.round(value)} °C` : NONE)],
  ["power_watts", "Power", (value) => (isKnown(value) ? `${Math.round(value)} W` : NONE)],
  ["utilization", "Utilisation", (value) => figures.percent(value, 0)],
];
const AXIS_TEXT = { pp: "pipeline stage", dp: "data parallel", cp: "context parallel", tp: "tensor parallel", ep: "expert parallel" };
const HEALTH = [
  ["well", "well", "good"],
  ["throttled", "throttled", "warn"],
  ["alarm", "alarm", "warn"],
  ["stalled", "stalled", "bad"],
  ["failed", "failed", "bad"],
];
const MOST_HEIGHT = 620;
const MOST_ROWS = 64;
const ROW_CELLS = 32;

// The part in which names of hosts differ.
function shortNames(names) {
  if (names.length < 2) return names;
  let same = 0;
  while (same < names[0].length && names.every((name) => name[same] === names[0][same])) same += 1;
  const cut = names[0].slice(0, same).search(/\d*$/);
  return cut > 4 ? names.map((name) => `…${name.slice(cut)}`) : names;
}

class RanksView {
  constructor(page) {
    this.page = page;
    this.by = null;
    this.group = recall("ranks.group", "layout");
    this.selected = null;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "The ranks of this run" });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.canvas.addEventListener("click", (event) => this.select(this.rankAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.tools = el("div", { class: "tools" });
    this.scale = el("div", { class: "scale" });
    this.side = el("aside", { class: "side" });
    this.root = el("div", {}, this.tools, el("div", { class: "ranks" }, el("div", { class: "card" }, this.scale, this.canvas), this.side));
    this.observer = new ResizeObserver(() => this.view && this.draw());
    this.observer.observe(this.canvas.parentElement);
  }

  async refresh() {
    const request = { rank: this.selected };
    this.asked = request;
    const view = await this.page.data.view(this.page.key, "ranks", request);
    if (this.asked !== request) return; // answered after a later one was asked for
    this.view = view;
    if (!this.view.world_size) {
      this.root.replaceChildren(el("div", { class: "card" }, emptyState("No ranks yet", "They appear once the first attempt has begun.")));
      return;
    }
    this.hosts = this.view.hosts;
    this.perNode = this.hosts.length ? Math.max(1, Math.floor(this.view.world_size / this.hosts.length)) : Math.min(8, this.view.world_size);
    const available = this.choices().map(([value]) => value);
    if (!available.includes(this.by)) this.by = Object.keys(this.view.health).length ? "health" : available[0];
    this.showTools();
    this.draw();
    this.showSide();
  }

  choices() {
    const measured = RANK_COLOURS.filter(([key]) => this.view.columns[key]).map(([key, name]) => [key, name]);
    const axes = Object.keys(this.view.axes).map((axis) => [`axis:${axis}`, axis]);
    return [...measured, ["health", "Health"], ...axes];
  }

  showTools() {
    this.tools.replaceChildren(
      choice("Colour", this.choices(), this.by, (by) => {
        this.by = by;
        this.showTools();
        this.draw();
      }),
      choice("Arrange", [["layout", "By layout"], ["node", "By node"]], this.group, (group) => {
        this.group = group;
        remember("ranks.group", group);
        this.showTools();
        this.draw();
      }),
      el("span", { class: "spread" }),
      el("span", { class: "muted" }, `${figures.count(this.view.world_size)} ${this.view.world_size === 1 ? "rank" : "ranks"}${this.view.layout ? `, ${this.view.layout}` : ""}`)
    );
  }

  // Where each rank is drawn, in cells: blocks of ranks with a title, each with its rows and columns.
  blocks() {
    const { world_size: count, axes, stages } = this.view;
    const ranks = Array.from({ length: count }, (_, rank) => rank);
    if (this.group === "node" || !Object.keys(axes).length) {
      const nodes = [];
      for (let first = 0; first < count; first += this.perNode) nodes.push(ranks.slice(first, first + this.perNode));
      const names = shortNames(this.hosts);
      return { columns: this.perNode, blocks: [{ title: "", rows: nodes }], labels: (row) => names[row] || (count === 1 ? "rank 0" : `ranks ${row * this.perNode}…`) };
    }
    const at = (axis, rank) => (axes[axis] ? axes[axis][rank] : 0);
    const size = (axis) => (axes[axis] ? Math.max(...axes[axis]) + 1 : 1);
    const columns = size("cp") * size("tp");
    const blocks = Array.from({ length: size("pp") }, (_, stage) => ({
      title: size("pp") > 1 ? `stage ${stage}${stages && stages[stage] ? ` · ${stages[stage]}` : ""}` : "",
      rows: Array.from({ length: size("dp") }, () => []),
    }));
    for (const rank of ranks) blocks[at("pp", rank)].rows[at("dp", rank)][at("cp", rank) * size("tp") + at("tp", rank)] = rank;
    const labels = (row) => (size("dp") > 1 ? `dp ${row}` : "");
    const joined = columns * 2 <= ROW_CELLS && size("dp") > MOST_ROWS ? Math.floor(ROW_CELLS / columns) : 1;
    if (joined === 1) return { columns, blocks, labels };
    // Thousands of narrow rows: several stand side by side.
    for (const block of blocks) block.rows = Array.from({ length: Math.ceil(block.rows.length / joined) }, (_, row) => block.rows.slice(row * joined, (row + 1) * joined).flat());
    return { columns: columns * joined, blocks, labels: (row) => labels(row * joined) };
  }

  // The largest cells with which everything fits; tall blocks are folded into several columns.
  place(width) {
    const { columns, blocks, labels } = this.blocks();
    const rows = blocks[0].rows.length;
    const title = blocks[0].title ? 22 : 4;
    const labelWidth = Math.min(150, Math.max(...Array.from({ length: Math.min(rows, 64) }, (_, row) => labels(row).length)) * 6.2 + (labels(0) ? 10 : 0));
    for (let cell = 40; ; cell -= 1) {
      const foldWidth = labelWidth + columns * cell + 18;
      const across = Math.max(1, Math.floor((width + 18) / foldWidth));
      let folds = 1, blocksAcross = Math.min(blocks.length, across);
      if (blocks.length * 2 <= across) (blocksAcross = blocks.length), (folds = Math.min(rows, Math.floor(across / blocks.length)));
      // No more folds than the height asks for.
      while (folds > 1 && Math.ceil(rows / (folds - 1)) * cell <= 320) folds -= 1;
      const foldRows = Math.ceil(rows / folds);
      const blockHeight = title + foldRows * cell + 14;
      const height = Math.ceil(blocks.length / blocksAcross) * blockHeight;
      if ((height <= MOST_HEIGHT && foldWidth <= width + 18) || cell <= 5) {
        const cells = [], texts = [];
        blocks.forEach((block, number) => {
          const left = (number % blocksAcross) * folds * foldWidth, top = Math.floor(number / blocksAcross) * blockHeight;
          if (block.title) texts.push([block.title, left + labelWidth, top + 13, "text"]);
          block.rows.forEach((row, rowNumber) => {
            const foldLeft = left + Math.floor(rowNumber / foldRows) * foldWidth, y = top + title + (rowNumber % foldRows) * cell;
            if (cell >= 11 || rowNumber % Math.ceil(14 / cell) === 0) texts.push([labels(rowNumber), foldLeft, y + cell / 2 + 4, "muted"]);
            row.forEach((rank, column) => cells.push({ rank, x: foldLeft + labelWidth + column * cell, y }));
          });
        });
        return { cell, cells, texts, height };
      }
    }
  }

  draw() {
    if (!this.view.world_size) return;
    const width = this.canvas.parentElement.clientWidth - 32;
    if (width <= 0) return;
    const { cell, cells, texts, height } = (this.placed = this.place(width));
    const ratio = devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    context.font = "11.5px system-ui, sans-serif";
    const ink = { text: colour("text"), muted: colour("muted") };
    for (const [text, x, y, name] of texts) {
      context.fillStyle = ink[name];
      context.fillText(text, x, y, 150);
    }
    const paint = this.painter();
    const gap = cell > 12 ? 2 : 1;
    for (const { rank, x, y } of cells) {
      context.fillStyle = paint(rank);
      context.beginPath();
      context.roundRect(x, y, cell - gap, cell - gap, cell > 12 ? 4 : 1.5);
      context.fill();
    }
    this.outline(context, gap);
    this.canvas.dataset.cells = String(cells.length);
  }

  // The selected rank, and those it forms a group with.
  outline(context, gap) {
    if (this.selected === null) return;
    const { cell, cells } = this.placed;
    const { axes } = this.view;
    const names = Object.keys(axes).filter((axis) => axis !== "ep");
    for (const { rank, x, y } of cells) {
      const differing = names.filter((axis) => axes[axis][rank] !== axes[axis][this.selected]);
      if (rank !== this.selected && differing.length !== 1) continue;
      context.strokeStyle = rank === this.selected ? colour("text") : withAlpha(colour("text"), 0.35);
      context.lineWidth = rank === this.selected ? 2 : 1;
      context.strokeRect(x - 0.5, y - 0.5, cell - gap + 1, cell - gap + 1);
    }
  }

  painter() {
    if (this.by === "health") {
      const shades = Object.fromEntries(HEALTH.map(([state, , name]) => [state, withAlpha(colour(name), state === "well" ? 0.45 : state === "alarm" || state === "throttled" ? 0.75 : 1)]));
      this.scale.replaceChildren(...HEALTH.map(([state, text]) => el("span", { class: "key" }, el("i", { style: { background: shades[state] } }), `${text} ${this.countState(state)}`)));
      return (rank) => shades[this.health(rank).state];
    }
    if (this.by.startsWith("axis:")) {
      const axis = this.by.slice(5), places = this.view.axes[axis];
      const count = Math.max(...places) + 1;
      const shades = Array.from({ length: PALETTE }, (_, number) => colour(`series-${number + 1}`));
      const shade = (place) => withAlpha(shades[place % PALETTE], 0.35 + 0.6 * ((Math.floor(place / PALETTE) % 3) / 2 || (count <= PALETTE ? 0.7 : 0)));
      this.scale.replaceChildren(el("span", {}, `${AXIS_TEXT[axis]}: ${count} groups`));
      return (rank) => shade(places[rank]);
    }
    const [, name, format] = RANK_COLOURS.find(([key]) => key === this.by);
    const values = this.view.columns[this.by];
    const known = values.filter(isKnown).sort((a, b) => a - b);
    const unknown = colour("unknown");
    if (!known.length) {
      this.scale.replaceChildren(el("span", {}, `${name} is not known`));
      return () => unknown;
    }
    const low = known[0], median = known[Math.floor(known.length / 2)];
    // A spread of a few percent is noise and stays calm.
    const high = Math.max(known.at(-1), median * 1.15, low + 1e-12);
    const stops = [0, 1, 2, 3, 4].map((number) => colour(`heat-${number}`).match(/[\d.]+/g).map(Number));
    replace(
      this.scale,
      el("span", {}, format(low)), el("span", { class: "ramp" }), el("span", {}, format(high)),
      el("span", {}, `median ${format(median)}`),
      this.view.window_steps && this.by.endsWith("_seconds") ? el("span", {}, `mean of the ${this.view.window_steps} steps before step ${figures.count(this.view.step + 1)}`) : null
    );
    return (rank) => {
      if (!isKnown(values[rank])) return unknown;
      const place = Math.min(3.999, Math.max(0, ((values[rank] - low) / (high - low)) * 4));
      const from = stops[Math.floor(place)], to = stops[Math.floor(place) + 1], part = place % 1;
      return `rgb(${[0, 1, 2].map((channel) => Math.round(from[channel] + (to[channel] - from[channel]) * part)).join(",")})`;
    };
  }

  health(rank) {
    const known = this.view.health[rank];
    if (known) return known;
    const reason = this.view.columns.throttled && this.view.columns.throttled[rank];
    return reason ? { state: "throttled", text: `clock held down by ${reason}` } : { state: "well", text: "" };
  }

  countState(state) {
    let count = 0;
    for (let rank = 0; rank < this.view.world_size; rank += 1) count += this.health(rank).state === state;
    return figures.count(count);
  }

  rankAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const { cell, cells } = this.placed;
    const hit = cells.find((place) => x >= place.x && x < place.x + cell && y >= place.y && y < place.y + cell);
    return hit ? hit.rank : null;
  }

  hover(event) {
    const rank = this.placed ? this.rankAt(event) : null;
    if (rank === null) return tip.hide();
    tip.show([`rank ${rank}${this.hostOf(rank) ? ` on ${this.hostOf(rank)}` : ""}`, this.placeText(rank), ...this.rankFigures(rank).map(([name, value]) => `${name} ${value}`), this.health(rank).text].filter(Boolean).join("\n"), event);
  }

  hostOf(rank) {
    return this.hosts[Math.floor(rank / this.perNode)] || "";
  }

  placeText(rank) {
    return Object.entries(this.view.axes).map(([axis, places]) => `${axis} ${places[rank]}`).join(", ");
  }

  rankFigures(rank) {
    return RANK_COLOURS.filter(([key]) => this.view.columns[key]).map(([key, name, format]) => [name, format(this.view.columns[key][rank])]);
  }

  select(rank) {
    this.selected = rank;
    this.refresh();
  }

  onKey(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.group === "node" ? this.perNode : this.blocks().columns, ArrowUp: -(this.group === "node" ? this.perNode : this.blocks().columns) };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const count = this.view.world_size;
    this.select(this.selected === null ? 0 : Math.min(count - 1, Math.max(0, this.selected + moves[event.key])));
  }

  showSide() {
    const parts = [];
    if (this.selected !== null && this.selected < this.view.world_size) parts.push(this.rankCard(this.selected));
    const times = this.view.columns.compute_seconds;
    if (times) parts.push(this.slowest(times));
    const troubled = Object.entries(this.view.health);
    if (troubled.length)
      parts.push(el("div", { class: "card" }, el("h3", {}, "In trouble"), el("table", { class: "list" }, troubled.slice(0, 12).map(([rank, { state, text }]) => el("tr", { class: "link", onclick: () => this.select(Number(rank)) }, el("td", { class: "nowrap" }, `rank ${rank}`), el("td", { class: state === "alarm" ? "warn-text" : "bad-text" }, text))))));
    if (!parts.length) parts.push(el("div", { class: "card" }, el("h3", {}, "No figures of ranks yet"), el("p", { class: "muted" }, "Ranks report their compute time and memory every few steps. Select a cell to see where it is in the layout.")));
    this.side.replaceChildren(...parts);
  }

  rankCard(rank) {
    const { history } = this.view;
    const past = history.compute_seconds[rank];
    const rows = [["host", this.hostOf(rank) || NONE], ...Object.entries(this.view.axes).map(([axis, places]) => [AXIS_TEXT[axis], `${places[rank]}`]), ...this.rankFigures(rank).map(([name, value]) => [name.toLowerCase(), value]), ["health", this.health(rank).text || "well"]];
    const log = `#/run/${this.page.key}/logs?rank=${rank}`;
    return el(
      "div",
      { class: "card" },
      el("h3", {}, `Rank ${rank}`),
      el("dl", { class: "facts" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      past && past.length > 1 ? [el("p", { class: "muted" }, "compute time of the last windows"), sparkline(past)] : null,
      el("p", {}, el("a", { href: log, class: "muted" }, "its log →"))
    );
  }

  slowest(times) {
    const known = times.map((seconds, rank) => [seconds, rank]).filter(([seconds]) => isKnown(seconds)).sort((a, b) => b[0] - a[0]);
    const median = known.length ? known[Math.floor(known.length / 2)][0] : 0;
    return el(
      "div",
      { class: "card" },
      el("h3", {}, "Slowest ranks"),
      el("table", { class: "list" }, known.slice(0, 6).map(([seconds, rank]) => el("tr", { class: "link", onclick: () => this.select(rank) }, el("td", { class: "nowrap" }, `rank ${rank}`), el("td", { class: "muted host" }, this.hostOf(rank)), el("td", { class: "number" }, figures.seconds(seconds)), el("td", { class: `number ${seconds > 1.15 * median ? "warn-text" : "muted"}` }, `${seconds >= median ? "+" : ""}${(100 * (seconds / (median || 1) - 1)).toFixed(0)}%`))))
    );
  }

  restyle() {
    if (this.view) this.draw();
  }

  close() {
    this.observer.disconnect();
    tip.hide();
  }
}
