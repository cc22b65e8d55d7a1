"use strict";
// Stages, attempts with their phases, checkpoints, validations and trouble, on one axis of time.

const ROW_HEIGHT = 26;
const TICK_SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2419200];
const MARK_ROWS = [["checkpoints", "checkpoints"], ["validations", "validations"], ["profiles", "profiles"], ["events", "alarms, stops"]];

class TimelineView {
  constructor(page) {
    this.page = page;
    this.zoom = null;
    this.root = el("div", {});
    this.observer = new ResizeObserver(() => this.view && this.draw());
    this.observer.observe(this.root);
  }

  async refresh() {
    this.view = await this.page.data.view(this.page.key, "timeline");
    this.width = 0;
    this.draw();
  }

  rows() {
    const { stages, attempts, marks } = this.view;
    const rows = [];
    const names = [...new Set(stages.map((stage) => stage.name))];
    for (const name of names)
      rows.push({
        label: name,
        blocks: stages.filter((stage) => stage.name === name).map((stage) => ({
          from: stage.from, to: stage.to,
          fill: { skipped: "fill-skipped", failed: "fill-failed" }[stage.state] || "fill-stage",
          text: `${name} ${stage.state}, ${figures.duration(stage.to - stage.from)}${stage.what ? `\n${stage.what}` : ""}`,
        })),
      });
    for (const attempt of attempts) {
      const blocks = attempt.phases.map((phase, index) => ({ from: phase.from, to: phase.to, fill: `fill-startup-${index % 2}`, text: `attempt ${attempt.number}: ${phase.name}, ${figures.duration(phase.to - phase.from)}` }));
      const last = attempt.phases.at(-1);
      if (attempt.first_step !== null) {
        const from = last ? Math.max(last.to, Math.min(attempt.first_step, last.to)) : attempt.first;
        blocks.push({ from, to: attempt.last, fill: "fill-train", text: `attempt ${attempt.number}: training, ${figures.duration(attempt.last - from)}${attempt.resumed_step !== null ? `, resumed after step ${figures.count(attempt.resumed_step)}` : ""}${attempt.ended ? `\nended: ${attempt.ended}` : ""}${attempt.error ? `\n${attempt.error}` : ""}` });
      } else if (attempt.last > (last ? last.to : attempt.first))
        blocks.push({ from: last ? last.to : attempt.first, to: attempt.last, fill: "fill-skipped", text: `attempt ${attempt.number}: before its first step, ${figures.duration(attempt.last - attempt.first)}` });
      if (attempt.ended === "failed") blocks.push({ from: attempt.last, to: attempt.last, fill: "fill-failed", text: `attempt ${attempt.number} failed${attempt.error ? `: ${attempt.error}` : ""}` });
      rows.push({ label: `attempt ${attempt.number}`, blocks });
    }
    for (const [name, label] of MARK_ROWS) {
      const own = marks.filter((mark) => mark.row === name);
      if (own.length) rows.push({ label, marks: own });
    }
    return rows;
  }

  draw() {
    const { began, ended } = this.view;
    if (!isKnown(began)) {
      this.root.replaceChildren(el("div", { class: "card" }, emptyState("Nothing has happened yet", "Stages, attempts and checkpoints appear here as they begin.")));
      return;
    }
    const width = this.root.clientWidth - 34;
    if (width <= 0 || (width === this.width && this.drawn === this.view)) return;
    this.width = width;
    this.drawn = this.view;
    const rows = this.rows();
    const label = width < 560 ? 0 : 118;
    const first = Math.min(began, ...rows.flatMap((row) => (row.blocks || []).map((block) => block.from)));
    const last = Math.max(ended, first + 1);
    const [from, to] = this.zoom || [first, last + (last - first) * 0.01];
    const x = (time) => label + ((time - from) / (to - from)) * (width - label - 8);
    const rowHeight = label ? ROW_HEIGHT : ROW_HEIGHT + 14;
    const height = rows.length * rowHeight + 34;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Timeline" });
    drawing.append(svg("clipPath", { id: "lanes" }, svg("rect", { x: label, y: 0, width: width - label, height })));
    this.ticks(from, to, width - label).forEach((time) => {
      drawing.append(svg("line", { class: "tick", x1: x(time), x2: x(time), y1: 0, y2: height - 24 }));
      drawing.append(svg("text", { x: x(time), y: height - 8, "text-anchor": time - from < (to - from) * 0.04 ? "start" : "middle" }, hoursText(time - first)));
    });
    const lanes = svg("g", { "clip-path": "url(#lanes)" });
    rows.forEach((row, number) => {
      const top = number * rowHeight + (label ? 0 : 14);
      drawing.append(svg("text", { class: "row", x: 0, y: label ? top + 17 : top - 2 }, row.label));
      lanes.append(svg("rect", { class: "lane", x: label, y: top + 4, width: width - label - 8, height: ROW_HEIGHT - 9, rx: 3 }));
      for (const block of row.blocks || [])
        lanes.append(this.withTip(svg("rect", { class: `block ${block.fill}`, x: x(block.from), y: top + 4, width: Math.max(2, x(block.to) - x(block.from)), height: ROW_HEIGHT - 9 }), block.text));
      for (const mark of row.marks || []) {
        const long = x(mark.to) - x(mark.from);
        const shape = long > 4
          ? svg("rect", { class: `block ${mark.level === "bad" ? "fill-failed" : "fill-checkpoint"}`, x: x(mark.from), y: top + 6, width: long, height: ROW_HEIGHT - 13 })
          : svg("line", { class: `mark ${mark.level}`, x1: x(mark.to), x2: x(mark.to), y1: top + 5, y2: top + ROW_HEIGHT - 6 });
        lanes.append(this.withTip(shape, `${mark.text}\n${hoursText(mark.to - first)} after the start`));
      }
    });
    drawing.append(lanes);
    this.selectable(drawing, (pixel) => from + ((pixel - label) / (width - label - 8)) * (to - from));
    const legend = el(
      "div",
      { class: "legend" },
      [["series-4", "stage"], ["series-6", "start-up"], ["series-1", "training"], ["series-3", "checkpoint, validation"], ["bad", "failure"]].map(([name, text]) => el("span", {}, el("i", { style: { borderColor: `var(--${name})` } }), text)),
      el("span", { class: "spread" }),
      this.zoom ? el("button", { type: "button", class: "quiet", onclick: () => this.setZoom(null) }, "Reset zoom") : el("span", { class: "faint" }, "drag to zoom")
    );
    this.root.replaceChildren(el("div", { class: "card timeline" }, legend, drawing), this.durations());
  }

  withTip(shape, text) {
    shape.addEventListener("pointermove", (event) => tip.show(text, event));
    shape.addEventListener("pointerleave", () => tip.hide());
    return shape;
  }

  selectable(drawing, timeAt) {
    let begun = null;
    const place = (event) => ((event.clientX - drawing.getBoundingClientRect().left) / drawing.getBoundingClientRect().width) * this.width;
    drawing.addEventListener("pointerdown", (event) => (begun = place(event)));
    drawing.addEventListener("pointerup", (event) => {
      const ended = place(event);
      if (begun !== null && Math.abs(ended - begun) > 8) this.setZoom([timeAt(Math.min(begun, ended)), timeAt(Math.max(begun, ended))]);
      begun = null;
    });
    drawing.addEventListener("dblclick", () => this.setZoom(null));
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.width = 0;
    this.draw();
  }

  ticks(from, to, width) {
    const most = Math.max(2, width / 90);
    const step = TICK_SECONDS.find((seconds) => (to - from) / seconds <= most) || (to - from) / most;
    const base = this.view.began;
    const ticks = [];
    for (let time = base + Math.ceil((from - base) / step) * step; time <= to; time += step) ticks.push(time);
    return ticks;
  }

  // Where the time went, attempt by attempt.
  durations() {
    const { attempts, stages } = this.view;
    const rows = stages.map((stage) => [stage.name, stage.state, stage.to - stage.from, stage.what || ""]);
    let previous = null;
    for (const attempt of attempts) {
      if (previous !== null && attempt.first > previous) rows.push(["between attempts", "", attempt.first - previous, ""]);
      for (const phase of attempt.phases) rows.push([`attempt ${attempt.number}`, phase.name, phase.to - phase.from, ""]);
      const trained = attempt.first_step === null ? null : attempt.last - Math.max(attempt.phases.at(-1)?.to ?? attempt.first, attempt.first);
      if (trained !== null) rows.push([`attempt ${attempt.number}`, "training", trained, attempt.ended ? `ended: ${attempt.ended}${attempt.error ? `, ${attempt.error}` : ""}` : "goes on"]);
      previous = attempt.last;
    }
    return el(
      "div",
      { class: "card" },
      el("h2", {}, "Where the time went"),
      el("table", { class: "lines" }, el("thead", {}, el("tr", {}, ["", "", "Time", "", ].map((text, index) => el("th", { class: index === 2 ? "number" : "" }, text)))),
        el("tbody", {}, rows.map(([name, part, seconds, what]) => el("tr", {}, el("td", { class: "nowrap" }, name), el("td", { class: "nowrap muted" }, part), el("td", { class: "number" }, figures.duration(seconds)), el("td", { class: "text muted" }, what)))))
    );
  }

  restyle() {}

  close() {
    this.observer.disconnect();
    tip.hide();
  }
}
