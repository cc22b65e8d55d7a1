"use strict";
// Live curves: one small chart a figure, all with the same axis, zoom, scale and smoothing.

const CHARTS = [
  { title: "Loss", lines: [["steps", "loss", "train"], ["validations", "loss", "validation"]], logs: true },
  { title: "Gradient norm", lines: [["steps", "grad_norm", "norm"]], logs: true },
  { title: "Learning rate", lines: [["steps", "lr", "rate"]] },
  { title: "Throughput", unit: "tokens/s/rank", lines: [["steps", "tokens_per_second_per_gpu", "rate"]] },
  { title: "MFU", format: (value) => figures.percent(value), lines: [["steps", "mfu", "causal attention"], ["steps", "mfu_full_attention", "full attention"]] },
  { title: "Step time", unit: "s", lines: [["steps", "step_seconds", "step"]] },
  { title: "Memory", unit: "GiB", lines: [["steps", "memory_gib", "rank 0"], ["ranks", "memory_gib_max", "fullest rank"], ["devices", "device_memory_max", "fullest device"]] },
  { title: "Compute time of ranks", unit: "s", lines: [["ranks", "compute_seconds_max", "slowest"], ["ranks", "compute_seconds_median", "median"]] },
  { title: "Waiting for other ranks", unit: "s", lines: [["ranks", "wait_seconds_max", "longest"], ["ranks", "wait_seconds_median", "median"]] },
  { title: "Rewards", lines: [["steps", "reward_chosen", "chosen"], ["steps", "reward_rejected", "rejected"]] },
  { title: "Reward margin", lines: [["steps", "reward_margin", "train"], ["validations", "reward_margin", "validation"]] },
  { title: "Reward accuracy", format: (value) => figures.percent(value), lines: [["steps", "reward_accuracy", "train"], ["validations", "reward_accuracy", "validation"]] },
  { title: "Log-probabilities", lines: [["steps", "logp_chosen", "chosen"], ["steps", "logp_rejected", "rejected"]] },
  { title: "Expert balance loss", lines: [["steps", "moe_balance", "balance"], ["steps", "moe_z", "router z"]] },
  { title: "z-loss", lines: [["steps", "z_loss", "z"]] },
  { title: "Temperature", unit: "°C", lines: [["devices", "temperature_max", "hottest"], ["devices", "temperature_mean", "mean"]] },
  { title: "Power", unit: "W", lines: [["devices", "power_total", "all devices"]] },
  { title: "Utilisation", format: (value) => figures.percent(value, 0), lines: [["devices", "utilization_mean", "mean"]] },
];
const NOT_DRAWN = new Set(["attempt", "batches", "seconds", "steps", "pairs", "learned_tokens"]);
const PALETTE = 8;
const AXIS_NAMES = { step: "Steps", tokens: "Tokens", time: "Time" };

// Which charts the runs have figures for; a figure that nobody thought of has a chart too.
function chartsOf(tableSets) {
  const has = (table, key) => tableSets.some((tables) => (tables[table] || []).includes(key));
  const known = new Set(CHARTS.flatMap((chart) => chart.lines.map(([table, key]) => `${table}.${key}`)));
  const charts = CHARTS.map((chart) => ({ ...chart, lines: chart.lines.filter(([table, key]) => has(table, key)) })).filter((chart) => chart.lines.length);
  const others = new Map();
  for (const tables of tableSets)
    for (const [table, keys] of Object.entries(tables))
      for (const key of keys) {
        if (known.has(`${table}.${key}`) || NOT_DRAWN.has(key)) continue;
        if (table === "validations" && has("steps", key)) continue;
        known.add(`${table}.${key}`);
        const [group, name] = key.includes(".") ? [key.slice(0, key.indexOf(".")), key.slice(key.indexOf(".") + 1)] : [key, key];
        const title = group.replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());
        if (!others.has(group)) others.set(group, { title, lines: [], logs: group.includes("loss") });
        others.get(group).lines.push([table, key, name]);
      }
  return [...charts, ...others.values()];
}

// An exponential mean without the bias of its start; a point that stands for many steps counts as many.
function smoothed(values, counts, weight) {
  if (!weight) return values;
  let mean = 0, mass = 0;
  return values.map((value, index) => {
    if (!isKnown(value)) return value;
    const keep = weight ** (counts ? Math.max(1, counts[index]) : 1);
    mean = keep * mean + (1 - keep) * value;
    mass = keep * mass + (1 - keep);
    return mean / mass;
  });
}

class CurvesView {
  constructor(page) {
    this.page = page;
    this.axis = recall("axis", "step");
    this.log = recall("log", false);
    this.robust = recall("robust", false);
    this.weight = recall("smoothing", 0);
    this.zoom = null;
    this.cards = new Map();
    this.grid = el("div", { class: "charts" });
    this.tools = el("div", { class: "tools" });
    this.root = el("div", {}, this.tools, this.grid);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.grid);
  }

  async refresh() {
    const shown = [this.page.key, ...this.page.overlays];
    const request = { axis: this.axis, points: 700, from: this.zoom && this.zoom[0], to: this.zoom && this.zoom[1] };
    this.asked = JSON.stringify([shown, request]);
    const asked = this.asked;
    const answers = await Promise.all(
      shown.map(async (key) => [await this.page.data.view(key, "summary"), await this.page.data.view(key, "series", request)])
    );
    if (asked !== this.asked) return; // another zoom was asked for meanwhile
    const sameName = new Set(answers.map(([summary]) => summary.name)).size === 1 && answers.length > 1;
    this.runs = answers.map(([summary, series]) => ({ key: series.key, name: sameName ? summary.id : summary.run, marks: summary.marks, figures: summary.figures, tables: series.tables }));
    this.showTools();
    this.draw();
  }

  showTools() {
    const set = (name, value) => {
      this[name] = value;
      remember(name === "weight" ? "smoothing" : name, value);
    };
    const output = el("output", {}, this.weight ? this.weight.toFixed(2) : "off");
    const others = this.page.otherRuns().filter((run) => !this.page.overlays.includes(run.key));
    const picker = others.length
      ? el(
          "select",
          { "aria-label": "Lay another run over this one", onchange: (event) => event.target.value && this.page.setOverlays([...this.page.overlays, event.target.value]) },
          el("option", { value: "" }, "+ another run"),
          others.map((run) => el("option", { value: run.key }, run.run))
        )
      : null;
    if (this.tools.contains(document.activeElement) && ["SELECT", "INPUT"].includes(document.activeElement.tagName)) return;
    replace(
      this.tools,
      choice("Axis", Object.entries(AXIS_NAMES), this.axis, (axis) => {
        set("axis", axis);
        this.zoom = null;
        this.refresh();
      }),
      choice("Range", [["all", "All"], ["half", "Last half"], ["tenth", "Last tenth"]], this.range || "all", (range) => this.setRange(range)),
      toggle("Log", this.log, () => this.toggleLog(), "Logarithmic values (l)"),
      toggle("No outliers", this.robust, () => (set("robust", !this.robust), this.showTools(), this.draw()), "Let extreme values leave the chart (o)"),
      el(
        "label",
        { class: "slider" },
        "Smoothing",
        el("input", {
          type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.weight), "aria-label": "Smoothing",
          oninput: (event) => {
            set("weight", Number(event.target.value));
            output.textContent = this.weight ? this.weight.toFixed(2) : "off";
            this.draw();
          },
          onchange: (event) => event.target.blur(),
        }),
        output
      ),
      this.zoom ? el("button", { type: "button", class: "reset", onclick: () => this.setZoom(null) }, "Reset zoom") : null,
      el("span", { class: "spread" }),
      picker,
      this.page.overlays.length ? el("div", { class: "chips" }, this.runs.map((run, index) => this.runChip(run, index))) : null
    );
  }

  runChip(run, index) {
    const swatch = el("span", { class: "swatch", style: { background: `var(--series-${(index % PALETTE) + 1})` } });
    const remove = () => this.page.setOverlays(this.page.overlays.filter((key) => key !== run.key));
    return el("button", { type: "button", class: "chip", "aria-pressed": "true", title: index ? "Take this run away" : null, onclick: index ? remove : null }, swatch, run.name, index ? " ×" : "");
  }

  toggleLog() {
    this.log = !this.log;
    remember("log", this.log);
    this.showTools();
    this.draw();
  }

  setZoom(zoom, range = null) {
    this.zoom = zoom;
    this.range = zoom ? range : null;
    this.refresh();
  }

  setRange(range) {
    const last = Math.max(...this.runs.map((run) => run.tables.steps?.x.at(-1) ?? 0));
    const part = { half: 0.5, tenth: 0.1 }[range];
    this.whole = this.zoom ? Math.max(this.whole || 0, last) : last;
    this.setZoom(part ? [this.whole * (1 - part), this.whole] : null, range);
  }

  scaleZoom(factor) {
    const [from, to] = this.zoom || this.extent();
    const middle = (from + to) / 2, half = ((to - from) / 2) * factor;
    this.setZoom([middle - half, middle + half]);
  }

  moveZoom(part) {
    if (!this.zoom) return;
    const [from, to] = this.zoom;
    this.setZoom([from + part * (to - from), to + part * (to - from)]);
  }

  extent() {
    const ends = this.runs.flatMap((run) => Object.values(run.tables).flatMap((table) => (table.x.length ? [table.x[0], table.x.at(-1)] : [])));
    return ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
  }

  draw() {
    const charts = chartsOf(this.runs.map((run) => run.figures));
    if (!charts.length) {
      this.grid.replaceChildren(el("div", { class: "chart wide" }, emptyState("No step yet", "Curves appear here with the first step.")));
      this.cards.clear();
      return;
    }
    const titles = new Set(charts.map((chart) => chart.title));
    for (const [title, card] of this.cards) if (!titles.has(title)) card.remove(), this.cards.delete(title);
    for (const child of [...this.grid.children]) if (!child.card) child.remove();
    for (const chart of charts) {
      let card = this.cards.get(chart.title);
      if (!card) {
        card = new ChartCard(this, chart.title);
        this.cards.set(chart.title, card);
        this.grid.append(card.root);
      }
      card.draw(chart);
    }
  }

  resize() {
    for (const card of this.cards.values()) card.resize();
  }

  restyle() {
    for (const card of this.cards.values()) card.shape = null;
    if (this.runs) this.draw();
  }

  close() {
    this.observer.disconnect();
    for (const card of this.cards.values()) card.remove();
  }
}

class ChartCard {
  constructor(view, title) {
    this.view = view;
    this.legend = el("div", { class: "legend" });
    this.plot = el("div", { class: "plot", ondblclick: () => view.setZoom(null) });
    this.unit = el("span", { class: "unit" });
    const enlarge = el("button", { type: "button", class: "quiet", title: "Larger or smaller", "aria-label": `Larger or smaller: ${title}`, onclick: () => this.enlarge() }, "⤢");
    this.root = el("section", { class: "chart", "aria-label": title }, el("header", {}, el("h3", {}, title), this.unit, el("span", { class: "spread" }), enlarge), this.legend, this.plot);
    this.root.card = this;
  }

  enlarge() {
    this.root.classList.toggle("wide");
    this.resize();
  }

  get size() {
    const width = Math.max(200, this.plot.clientWidth || this.root.clientWidth - 24);
    return { width, height: this.root.classList.contains("wide") ? 420 : 200 };
  }

  resize() {
    if (this.chart && this.plot.clientWidth && this.chart.width !== this.size.width) this.chart.setSize(this.size);
    else if (this.chart && this.chart.height !== this.size.height) this.chart.setSize(this.size);
  }

  draw(spec) {
    this.spec = spec;
    this.unit.textContent = spec.unit || "";
    const { data, lines } = this.align(spec);
    const shape = JSON.stringify([lines.map(({ name, part, run }) => [name, part, run]), this.view.log, this.view.robust, this.view.axis, this.view.zoom, this.view.runs.length]);
    this.lines = lines;
    if (this.chart && shape === this.shape) this.chart.setData(data);
    else {
      if (this.chart) this.chart.destroy();
      this.shape = shape;
      this.chart = new uPlot(this.options(lines), data, this.plot);
    }
    this.showLegend(null);
  }

  // One table for all lines: their steps differ (validations, other runs), so that rows have gaps.
  align(spec) {
    const { runs, log, weight } = this.view;
    const tables = [], lines = [];
    const above = (values) => (log ? values.map((value) => (isKnown(value) && value > 0 ? value : null)) : values);
    runs.forEach((run, runIndex) => {
      spec.lines.forEach(([tableName, key, name], lineIndex) => {
        const table = run.tables[tableName];
        if (!table || !table.values[key]) return;
        const raw = above(table.values[key]);
        const colourIndex = runs.length > 1 ? runIndex : lineIndex;
        const line = { run: runIndex, name, colourIndex, dashed: runs.length > 1 && lineIndex > 0, points: tableName === "validations" };
        const columns = [table.x];
        const smooth = weight > 0 && tableName !== "validations";
        if (table.low[key] && runs.length === 1 && !smooth) {
          columns.push(above(table.high[key]), above(table.low[key]));
          lines.push({ ...line, part: "high" }, { ...line, part: "low" });
        }
        if (smooth) {
          columns.push(raw);
          lines.push({ ...line, part: "raw" });
        }
        columns.push(smooth ? smoothed(raw, table.counts, weight) : raw);
        lines.push({ ...line, part: "line" });
        tables.push(columns);
      });
    });
    return { data: tables.length ? uPlot.join(tables) : [[]], lines };
  }

  options(lines) {
    const { view } = this;
    const muted = colour("muted"), grid = withAlpha(colour("faint"), 0.18);
    const bands = [];
    const series = lines.map((line, index) => {
      const stroke = colour(`series-${(line.colourIndex % PALETTE) + 1}`);
      if (line.part === "high") bands.push({ series: [index + 1, index + 2], fill: withAlpha(stroke, 0.16) });
      const hidden = line.part === "high" || line.part === "low";
      const strokeOf = hidden ? "transparent" : line.part === "raw" ? withAlpha(stroke, 0.25) : stroke;
      return {
        stroke: strokeOf,
        width: line.part === "line" ? 1.6 : 1,
        dash: line.dashed ? [6, 4] : undefined,
        points: { show: line.points && line.part === "line", size: 5, fill: stroke, stroke },
        spanGaps: false,
      };
    });
    const zoom = view.zoom;
    const axis = { stroke: muted, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    return {
      ...this.size,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      cursor: {
        sync: { key: "curves", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        points: { size: 6 },
      },
      scales: {
        x: { time: false, range: (chart, low, high) => zoom || (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: view.log ? 3 : 1, range: (chart, low, high) => this.valueRange(low, high) },
      },
      axes: [
        { ...axis, size: 30, space: 70, values: (chart, splits) => splits.map((value) => (view.axis === "time" ? hoursText(value) : figures.short(value))) },
        { ...axis, size: 56, gap: 6, space: 34, ...(view.log ? { splits: (chart, index, low, high) => logTicks(low, high), filter: (chart, splits) => splits } : {}), values: (chart, splits) => splits.map((value) => (isKnown(value) ? this.format(value, true) : "")) },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [(chart) => this.showLegend(chart.cursor.idx)],
        setSelect: [
          (chart) => {
            if (chart.select.width < 6) return;
            const from = chart.posToVal(chart.select.left, "x"), to = chart.posToVal(chart.select.left + chart.select.width, "x");
            chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            view.setZoom([from, to]);
          },
        ],
        drawClear: [(chart) => this.drawMarks(chart)],
      },
    };
  }

  valueRange(low, high) {
    if (!isKnown(low) || !isKnown(high)) return this.view.log ? [0.1, 1] : [0, 1];
    if (this.view.robust && this.chart) {
      const values = this.lines.flatMap((line, index) => (line.part === "line" ? [...this.chart.data[index + 1]].filter(isKnown) : [])).sort((a, b) => a - b);
      if (values.length > 20) (low = values[Math.floor(values.length * 0.02)]), (high = values[Math.ceil(values.length * 0.98) - 1]);
    }
    if (this.view.log) return [low * 0.95, high * 1.05 || 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  format(value, isTick = false) {
    if (this.spec.format) return this.spec.format(value);
    return isTick && Math.abs(value) >= 1000 ? figures.short(value) : figures.any(value);
  }

  // Restarts, alarms and failures, and the best checkpoint, as lines behind the curves.
  drawMarks(chart) {
    if (this.view.axis === "tokens" || this.view.runs.length > 1) return;
    const { ctx } = chart;
    const { left, top, width, height } = chart.bbox;
    for (const mark of this.view.runs[0].marks) {
      const place = this.view.axis === "time" ? mark.time : mark.step;
      if (!isKnown(place)) continue;
      const x = Math.round(chart.valToPos(place, "x", true));
      if (x < left || x > left + width) continue;
      ctx.save();
      ctx.strokeStyle = withAlpha(colour({ restart: "muted", best: "good", bad: "bad", warn: "warn" }[mark.kind] || "muted"), 0.55);
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      ctx.restore();
    }
  }

  showLegend(index) {
    if (!this.chart || !this.lines) return;
    const data = this.chart.data;
    const several = this.view.runs.length > 1;
    const items = this.lines.map((line, number) => {
      if (line.part !== "line") return null;
      let row = index;
      if (row === null || row === undefined) row = data[0].length - 1;
      while (row > 0 && !isKnown(data[number + 1][row])) row -= 1;
      const swatch = el("i", { class: line.dashed ? "dashed" : "", style: { borderColor: `var(--series-${(line.colourIndex % PALETTE) + 1})` } });
      const name = several ? `${this.view.runs[line.run].name}${line.dashed ? ` ${line.name}` : ""}` : line.name;
      return el("span", {}, swatch, name, el("b", {}, this.format(data[number + 1][row])));
    });
    const x = isKnown(index) ? data[0][index] : null;
    const place = x === null ? null : el("span", { class: "place" }, this.view.axis === "time" ? hoursText(x) : `${this.view.axis} ${figures.count(x)}`);
    this.legend.replaceChildren(...items.filter(Boolean), ...(place ? [place] : []));
  }

  remove() {
    if (this.chart) this.chart.destroy();
    this.root.remove();
  }
}

// Ticks of a logarithmic axis: even ones within a decade or so, 1, 2 and 5 of some decades, powers of ten of many.
function logTicks(low, high) {
  if (!(low > 0) || !(high > low)) return [low];
  const ticks = [];
  if (high / low < 20) {
    const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((value) => value >= rough);
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(Number(tick.toPrecision(6)));
    return ticks;
  }
  const factors = high / low < 2e3 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1)
    for (const factor of factors) if (factor * 10 ** power >= low && factor * 10 ** power <= high) ticks.push(Number((factor * 10 ** power).toPrecision(6)));
  return ticks;
}

function hoursText(seconds) {
  if (!isKnown(seconds)) return "";
  if (seconds < 120) return `${trimZeros(seconds.toFixed(1))} s`;
  if (seconds < 7200) return `${trimZeros((seconds / 60).toFixed(1))} min`;
  return `${trimZeros((seconds / 3600).toFixed(1))} h`;
}
