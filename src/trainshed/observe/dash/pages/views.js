"use strict";
// The list of runs, and the views of a run that are texts and tables.

const STATE_TEXT = { running: "running", done: "done", failed: "failed", stopped: "stopped", silent: "silent", new: "not begun" };

function stateBadge(run) {
  const state = run.state === "silent" || run.state === "new" ? "" : run.state;
  const title = run.state === "silent" ? "Nothing was written for a while, and whether it still runs cannot be seen from here" : null;
  return el("span", { class: "state", title }, el("i", { class: `dot ${state}` }), STATE_TEXT[run.state] || run.state);
}

class RunsView {
  constructor(page) {
    this.page = page;
    this.picked = new Set();
    this.states = new Set();
    this.cursor = 0;
    this.search = el("input", { type: "search", placeholder: "Filter by name, cluster, layout …", "aria-label": "Filter runs", oninput: () => this.draw() });
    this.chips = el("div", { class: "chips" });
    this.compare = el("button", { type: "button", class: "hidden", onclick: () => this.openPicked() });
    this.table = el("div", { class: "card" });
    this.root = el("div", {}, el("div", { class: "tools" }, this.search, this.chips, el("span", { class: "spread" }), this.compare), this.table);
  }

  async refresh() {
    this.runs = (await this.page.data.runs()).runs;
    this.draw();
    return this.runs.some((run) => run.read !== null);
  }

  shown() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return this.runs.filter((run) => {
      const text = [run.run, run.cluster, run.layout, run.device, run.engine, run.state].join(" ").toLowerCase();
      return (!this.states.size || this.states.has(run.state)) && words.every((word) => text.includes(word));
    });
  }

  draw() {
    const counts = new Map();
    for (const run of this.runs) counts.set(run.state, (counts.get(run.state) || 0) + 1);
    const flip = (state) => {
      this.states.has(state) ? this.states.delete(state) : this.states.add(state);
      this.draw();
    };
    this.chips.replaceChildren(
      ...(counts.size > 1 ? [...counts].map(([state, count]) => el("button", { type: "button", class: "chip", "aria-pressed": String(this.states.has(state)), onclick: () => flip(state) }, el("i", { class: `dot ${state}` }), `${STATE_TEXT[state] || state} ${count}`)) : [])
    );
    this.compare.classList.toggle("hidden", this.picked.size < 2);
    this.compare.textContent = `Compare ${this.picked.size} runs`;
    if (!this.runs.length) {
      this.table.replaceChildren(emptyState("No runs yet", "A run appears here as soon as ", el("code", {}, "trainshed run RECIPE"), " has begun."));
      return;
    }
    const rows = this.shown();
    this.cursor = Math.max(0, Math.min(this.cursor, rows.length - 1));
    if (!rows.length) {
      this.table.replaceChildren(emptyState("No run matches", "Clear the filter to see all ", String(this.runs.length), "."));
      return;
    }
    const head = ["", "Run", "State", "Step", "Loss", "", "MFU", "Tokens/s/rank", "Left", "Updated"];
    this.table.replaceChildren(
      el(
        "table",
        { class: "runs" },
        el("thead", {}, el("tr", {}, head.map((text) => el("th", { class: ["Loss", "MFU", "Tokens/s/rank", "Left", "Updated"].includes(text) ? "number" : "" }, text)))),
        el("tbody", {}, rows.map((run, index) => this.row(run, index)))
      )
    );
  }

  row(run, index) {
    const pick = el("input", {
      type: "checkbox", checked: this.picked.has(run.key), "aria-label": `Compare ${run.run}`,
      onclick: (event) => event.stopPropagation(),
      onchange: (event) => {
        event.target.checked ? this.picked.add(run.key) : this.picked.delete(run.key);
        this.draw();
      },
    });
    const share = run.steps && run.step ? Math.min(1, run.step / run.steps) : 0;
    const progress = run.read !== null
      ? el("span", { class: "muted" }, `reading ${figures.percent(run.read, 0)}`)
      : run.step !== null
        ? [el("span", { class: "nowrap" }, figures.count(run.step), run.steps ? el("span", { class: "muted" }, ` of ${figures.count(run.steps)}`) : null), run.steps ? el("div", { class: "bar" }, el("i", { style: { width: `${100 * share}%` } })) : null]
        : el("span", { class: "muted" }, run.phase || NONE);
    return el(
      "tr",
      { class: "link", "aria-selected": String(index === this.cursor), onclick: () => this.page.go(`#/run/${run.key}`) },
      el("td", { class: "pick" }, pick),
      el("td", { class: "name" }, el("a", { class: "run-name", href: `#/run/${run.key}` }, run.name, el("span", { class: "id" }, run.id)), run.cluster !== "local" ? el("div", { class: "muted" }, run.cluster) : null),
      el("td", { class: "where" }, stateBadge(run), run.alarms ? el("span", { class: "warn-text", title: "Alarms and stalls" }, ` ${run.alarms} ⚠`) : null),
      el("td", { class: "progress" }, progress),
      el("td", { class: "number loss" }, figures.loss(run.loss)),
      el("td", { class: "curve" }, sparkline(run.sparkline)),
      el("td", { class: "number optional" }, figures.percent(run.mfu)),
      el("td", { class: "number optional" }, figures.count(run.tokens_per_second_per_gpu)),
      el("td", { class: "number optional" }, run.eta_seconds ? figures.duration(run.eta_seconds) : NONE),
      el("td", { class: "number optional muted" }, figures.ago(run.updated))
    );
  }

  move(by) {
    this.cursor += by;
    this.draw();
    this.table.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }

  open() {
    const run = this.shown()[this.cursor];
    if (run) this.page.go(`#/run/${run.key}`);
  }

  pick() {
    const run = this.shown()[this.cursor];
    if (!run) return;
    this.picked.has(run.key) ? this.picked.delete(run.key) : this.picked.add(run.key);
    this.draw();
  }

  openPicked() {
    const [first, ...others] = this.picked;
    this.page.go(`#/run/${first}/curves?with=${others.join(",")}`);
  }

  restyle() {}
  close() {}
}

class CheckpointsView {
  constructor(page) {
    this.page = page;
    this.root = el("div", {});
  }

  async refresh() {
    const view = await this.page.data.view(this.page.key, "checkpoints");
    const parts = [];
    if (!view.checkpoints.length) parts.push(el("div", { class: "card" }, emptyState("No checkpoint yet", "The recipe's ", el("code", {}, "checkpoint.every"), " says when one is written.")));
    else
      parts.push(
        el(
          "div",
          { class: "card scroll" },
          view.stored_apart ? el("p", {}, "These checkpoints are kept elsewhere (checkpoint.to): sizes are as they were written.") : null,
          el("table", {},
            el("thead", {}, el("tr", {}, ["Step", "State", "Size", "Written in", "Training stood still", "Validation loss", "Attempt", "When"].map((text, index) => el("th", { class: [0, 2, 3, 4, 5, 6].includes(index) ? "number" : "" }, text)))),
            el("tbody", {}, view.checkpoints.map((row) => this.row(row, view))))
        )
      );
    parts.push(...view.verdicts.map((verdict) => this.verdict(verdict)));
    this.root.replaceChildren(...parts);
  }

  row(row, view) {
    const names = [row.step === view.latest && "latest", row.step === view.best && "best"].filter(Boolean);
    const shade = { committed: "good-text", failed: "bad-text", unfinished: "warn-text" }[row.state] || "muted";
    const state = row.state === "committed" && !row.stored && !view.stored_apart ? "removed" : row.state;
    return el(
      "tr",
      {},
      el("td", { class: "number" }, figures.count(row.step)),
      el("td", {}, el("span", { class: state === "removed" ? "muted" : shade }, state), names.length ? el("span", { class: "muted" }, `  ${names.join(", ")}`) : null, row.what ? el("div", { class: "muted" }, row.what) : null),
      el("td", { class: "number" }, figures.bytes(row.bytes)),
      el("td", { class: "number" }, figures.duration(row.seconds)),
      el("td", { class: "number" }, figures.duration(row.stall_seconds)),
      el("td", { class: "number" }, figures.loss(row.validation_loss)),
      el("td", { class: "number" }, row.attempt ?? NONE),
      el("td", { class: "muted nowrap" }, row.time ? figures.clock(row.time) : NONE)
    );
  }

  verdict(verdict) {
    const { tensors, logits, probe } = verdict;
    const rows = [];
    if (tensors) rows.push(["tensors", `${figures.count(tensors.equal)} of ${figures.count(tensors.compared)} equal${tensors.dtype ? `, as ${tensors.dtype}` : ""}${tensors.first_difference ? `; first difference: ${tensors.first_difference}` : ""}`]);
    if (logits) rows.push(["logits", logits.ran ? Object.entries(logits).filter(([key, value]) => key !== "ran" && ["number", "string", "boolean"].includes(typeof value)).map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "number" ? figures.any(value) : value}`).join(", ") : `not compared: ${logits.reason || ""}`]);
    if (probe) rows.push(["probe loss", figures.loss(probe.loss)]);
    for (const [name, version] of Object.entries(verdict.versions || {})) rows.push([name, version]);
    const outcome = verdict.passed === null ? ["cannot be read", "warn-text"] : verdict.passed ? ["proven", "good-text"] : ["failed", "bad-text"];
    return el("div", { class: "card" }, el("h2", {}, "Verdict of ", el("span", { class: "mono" }, verdict.path.replace(/\/verdict\.json$/, "")), ": ", el("span", { class: outcome[1] }, outcome[0])), el("table", {}, rows.map(([name, value]) => el("tr", {}, el("td", { class: "muted nowrap" }, name), el("td", { class: "spread" }, value)))));
  }

  restyle() {}
  close() {}
}

class EventsView {
  constructor(page, parameters) {
    this.page = page;
    this.kinds = new Set();
    this.search = el("input", { type: "search", placeholder: "Search events", "aria-label": "Search events", oninput: () => this.refresh() });
    this.rank = el("input", { type: "number", min: "0", placeholder: "rank", "aria-label": "Rank", value: parameters.get("rank") || "", style: { width: "90px" }, oninput: () => this.refresh() });
    this.chips = el("div", { class: "chips" });
    this.count = el("span", { class: "muted" });
    this.table = el("div", { class: "card" });
    this.root = el("div", {}, el("div", { class: "tools" }, this.search, this.rank, this.count), el("div", { class: "tools" }, this.chips), this.table);
  }

  async refresh() {
    const request = { search: this.search.value, rank: this.rank.value, kinds: [...this.kinds].join(",") };
    this.asked = request;
    const view = await this.page.data.view(this.page.key, "events", request);
    if (this.asked !== request) return; // answered after a later one was asked for
    const flip = (kind) => {
      this.kinds.has(kind) ? this.kinds.delete(kind) : this.kinds.add(kind);
      this.refresh();
    };
    this.chips.replaceChildren(...Object.entries(view.kinds).map(([kind, count]) => el("button", { type: "button", class: "chip", "aria-pressed": String(this.kinds.has(kind)), onclick: () => flip(kind) }, `${kind.replaceAll("_", " ")} ${figures.count(count)}`)));
    this.count.textContent = view.matches > view.events.length ? `the newest ${view.events.length} of ${figures.count(view.matches)}` : `${figures.count(view.matches)} events`;
    if (!view.events.length) {
      this.table.replaceChildren(emptyState(Object.keys(view.kinds).length ? "No event matches" : "No events yet", "Steps are drawn as curves; everything else that happens is told here."));
      return;
    }
    const head = ["When", "Attempt", "Rank", "Step", "Kind", ""];
    this.table.replaceChildren(
      el("table", { class: "lines" },
        el("thead", {}, el("tr", {}, head.map((text) => el("th", { class: ["Attempt", "Rank"].includes(text) ? "optional" : "" }, text)))),
        el("tbody", {}, view.events.map((event) =>
          el("tr", { class: event.level },
            el("td", { class: "nowrap muted" }, figures.clock(event.time)),
            el("td", { class: "optional muted" }, event.attempt || ""),
            el("td", { class: "optional muted" }, event.rank ?? "launcher"),
            el("td", { class: "number muted" }, isKnown(event.step) ? figures.count(event.step) : ""),
            el("td", { class: "nowrap muted" }, event.kind.replaceAll("_", " ")),
            el("td", { class: "text" }, marked(event.text, this.search.value))))))
    );
  }

  restyle() {}
  close() {}
}

// A text with what was searched for made visible.
function marked(text, search) {
  if (!search) return text;
  const parts = [], lower = text.toLowerCase(), needle = search.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(needle); at >= 0; at = lower.indexOf(needle, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + needle.length)));
    from = at + needle.length;
  }
  return [...parts, text.slice(from)];
}

class LogsView {
  constructor(page, parameters) {
    this.page = page;
    this.wantedRank = parameters.get("rank");
    this.file = null;
    this.search = el("input", { type: "search", placeholder: "Search this log", "aria-label": "Search this log", oninput: () => this.refresh() });
    this.folder = el("select", { "aria-label": "Attempt or stage", onchange: () => this.choose(this.folder.value, null) });
    this.part = el("input", { list: "log-parts", "aria-label": "Rank or part", style: { width: "140px" }, onchange: () => this.choose(this.folder.value, this.part.value) });
    this.parts = el("datalist", { id: "log-parts" });
    this.count = el("span", { class: "muted" });
    this.log = el("div", { class: "card log", tabindex: "0" });
    this.tools = el("div", { class: "tools" }, this.folder, this.part, this.parts, this.search, this.count);
    this.root = el("div", {}, this.tools, this.log);
  }

  async refresh() {
    const request = { file: this.file, search: this.search.value };
    this.asked = request;
    const view = await this.page.data.view(this.page.key, "logs", request);
    if (this.asked !== request) return; // answered after a later one was asked for
    this.files = view.logs.map((log) => log.file);
    if (!view.log) {
      this.tools.classList.add("hidden");
      this.log.replaceChildren(emptyState("No log yet", "What ranks and stages print is kept here."));
      return;
    }
    this.tools.classList.remove("hidden");
    if (this.wantedRank !== null) {
      const rank = this.wantedRank;
      this.wantedRank = null;
      const own = this.files.filter((file) => file.endsWith(`/rank-${String(rank).padStart(5, "0")}.log`)).at(-1);
      if (own && own !== view.log.file) {
        this.file = own;
        return this.refresh();
      }
    }
    this.file = view.log.file;
    this.showChoices();
    const { log } = view;
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 40 || !this.log.children.length || this.shownFile !== this.file;
    this.shownFile = this.file;
    this.count.textContent = this.search.value
      ? `${figures.count(log.matches)} lines match${log.matches > log.lines.length ? `, the last ${log.lines.length} are shown` : ""}`
      : `${figures.bytes(log.bytes)}${log.matches > log.lines.length || !log.whole ? `, the last ${figures.count(log.lines.length)} lines` : ""}`;
    this.log.replaceChildren(...(log.lines.length ? log.lines.map((line) => el("div", {}, el("span", { class: "n" }, line.number === null ? "" : String(line.number)), el("span", { class: `t ${levelOf(line.text)}` }, marked(line.text, this.search.value)))) : [emptyState(this.search.value ? "No line matches" : "This log is empty")]));
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  showChoices() {
    const [folder, name] = this.file.split("/");
    const folders = [...new Set(this.files.map((file) => file.split("/")[0]))];
    if (document.activeElement !== this.folder) this.folder.replaceChildren(...folders.map((entry) => el("option", { value: entry, selected: entry === folder }, entry.replace(/^attempt-0*/, "attempt "))));
    if (document.activeElement !== this.part) this.part.value = name.replace(/\.log$/, "");
    this.parts.replaceChildren(...this.files.filter((file) => file.startsWith(`${folder}/`)).map((file) => el("option", { value: file.split("/")[1].replace(/\.log$/, "") })));
  }

  choose(folder, part) {
    const own = this.files.filter((file) => file.startsWith(`${folder}/`));
    const number = part === null ? null : part.match(/\d+/)?.[0].padStart(5, "0");
    this.file = own.find((file) => part !== null && file === `${folder}/${part}.log`) || own.find((file) => number && file === `${folder}/rank-${number}.log`) || own[0];
    this.part.blur();
    this.folder.blur();
    this.refresh();
  }

  restyle() {}
  close() {}
}

function levelOf(text) {
  if (/\b(error|traceback|fatal|exception)\b/i.test(text)) return "bad-text";
  return /\bwarn(ing)?\b/i.test(text) ? "warn-text" : "";
}

class PlanView {
  constructor(page) {
    this.page = page;
    this.root = el("div", {});
  }

  async refresh() {
    const view = await this.page.data.view(this.page.key, "plan");
    const { predicted, measured } = view;
    const parts = [];
    if (!view.layout && !measured) parts.push(el("div", { class: "card" }, emptyState("No plan yet", "The layout appears with the first attempt.")));
    else {
      parts.push(el("div", { class: "card" }, el("h2", {}, view.layout || "layout unknown"), el("p", {}, view.world_size ? `${figures.count(view.world_size)} ${view.world_size === 1 ? "rank" : "ranks"}, attempt ${view.attempt}` : "", view.reasons.map((reason) => el("span", { style: { display: "block" } }, reason)))));
      parts.push(this.comparison(predicted, measured));
    }
    this.root.replaceChildren(...parts);
  }

  comparison(predicted, measured) {
    if (!measured) return el("div", { class: "card" }, emptyState("Not measured yet", "Figures appear with the first steps."));
    const rows = [
      ["Step time", "step_seconds", figures.seconds, true],
      ["MFU", "mfu", figures.percent, false],
      ["Memory of the fullest rank", "memory_gib", figures.gib, true],
      ["Tokens/s/rank", "tokens_per_second_per_gpu", figures.count, false],
    ];
    const body = rows.map(([name, key, format, lessIsBetter]) => {
      const plan = predicted ? predicted[key] : null, real = measured[key];
      const range = key === "step_seconds" && predicted && Array.isArray(predicted.step_seconds_range) ? predicted.step_seconds_range : null;
      const off = isKnown(plan) && isKnown(real) && plan ? real / plan - 1 : null;
      const outside = range && isKnown(real) && (real < range[0] || real > range[1]);
      const worse = off !== null && (lessIsBetter ? off > 0.1 : off < -0.1);
      return el("tr", {}, el("td", {}, name), el("td", { class: "number" }, format(plan), range ? el("div", { class: "faint" }, `${format(range[0])} to ${format(range[1])}`) : null), el("td", { class: "number" }, format(real)), el("td", { class: `number ${worse ? "warn-text" : "muted"}` }, off === null ? NONE : `${off >= 0 ? "+" : ""}${(100 * off).toFixed(1)}%`, outside ? el("div", { class: "warn-text" }, "outside the range") : null), el("td", {}, isKnown(plan) && isKnown(real) ? gauge(plan, real, range) : ""));
    });
    return el(
      "div",
      { class: "card scroll" },
      el("h2", {}, "Planned and measured"),
      el("p", {}, predicted ? `Measured are medians of the last ${figures.count(measured.steps)} steps of this attempt, without its warm-up.` : "Nothing was predicted for this attempt: the planner predicts jobs on GPUs, and layouts that it chose itself. Measured are medians without the warm-up."),
      el("table", {}, el("thead", {}, el("tr", {}, ["", "Planned", "Measured", "Off by", ""].map((text, index) => el("th", { class: [1, 2, 3].includes(index) ? "number" : "" }, text)))), el("tbody", {}, body))
    );
  }

  restyle() {}
  close() {}
}

function gauge(plan, real, range) {
  const [low, high] = range || [plan, plan];
  const from = Math.min(low, plan, real) * 0.92, to = Math.max(high, plan, real) * 1.08;
  const place = (value) => `${(100 * (value - from)) / (to - from || 1)}%`;
  const band = range ? el("i", { style: { left: place(low), width: `${(100 * (high - low)) / (to - from || 1)}%` } }) : null;
  return el("div", { class: "gauge" }, band, el("b", { title: "planned", style: { left: place(plan) } }), el("b", { class: "measured", title: "measured", style: { left: place(real) } }));
}

// An answer of white space alone is shown as a quoted text: nobody sees it otherwise.
const shownAnswer = (text) => (text.trim() ? text : el("span", { class: "faint" }, JSON.stringify(text)));

class AnswersView {
  constructor(page) {
    this.page = page;
    this.steps = null;
    this.root = el("div", {});
  }

  async refresh() {
    const view = await this.page.data.view(this.page.key, "answers");
    if (!view.steps.length) {
      this.root.replaceChildren(el("div", { class: "card" }, emptyState("No sample answers", "Write ", el("code", {}, "data: {validation: {prompts: [...]}}"), " and the model answers them at every validation.")));
      return;
    }
    const known = new Set(view.steps);
    const most = innerWidth < 720 ? 2 : 3;
    if (!this.steps || !this.steps.every((step) => known.has(step))) this.steps = null;
    const shown = this.steps || [...new Set([view.steps[0], view.steps[Math.floor((view.steps.length - 1) / 2)], view.steps.at(-1)])].slice(-most);
    const heads = shown.map((step, column) =>
      el("th", {}, el("select", {
        "aria-label": `Step of column ${column + 1}`,
        onchange: (event) => {
          this.steps = shown.map((other, index) => (index === column ? Number(event.target.value) : other));
          event.target.blur();
          this.refresh();
        },
      }, view.steps.map((value) => el("option", { value: String(value), selected: value === step }, `after step ${figures.count(value)}`))))
    );
    if (this.root.contains(document.activeElement) && document.activeElement.tagName === "SELECT") return;
    const cell = (answer) => el("td", { class: "text" }, answer ? [shownAnswer(answer.text), answer.ended ? null : el("span", { class: "faint", title: "The model had not ended its answer" }, " …")] : el("span", { class: "faint" }, NONE));
    this.root.replaceChildren(
      el("div", { class: "card scroll" }, el("table", { class: "answers" }, el("thead", {}, el("tr", {}, el("th", {}, "Prompt"), heads)), el("tbody", {}, view.prompts.map((row) => el("tr", {}, el("td", { class: "text muted" }, row.prompt), shown.map((step) => cell(row.answers[view.steps.indexOf(step)])))))))
    );
  }

  restyle() {}
  close() {}
}

// The scores of checkpoints: each as a line over the steps, then all of them as a table.
class ScoresView {
  constructor(page) {
    this.page = page;
    this.root = el("div", {});
  }

  async refresh() {
    const view = await this.page.data.view(this.page.key, "evaluations");
    if (!view.scores.length) {
      this.root.replaceChildren(el("div", { class: "card" }, emptyState("No scores", "Write ", el("code", {}, "eval: {every: 500, perplexity: validation}"), " in the recipe, or run ", el("code", {}, `trainshed eval ${view.run}`), ".")));
      return;
    }
    const score = (value) => (isKnown(value) ? trimZeros(value.toPrecision(5)) : NONE);
    const last = (row) => row.values.findLast(isKnown);
    const shown = view.steps.slice(-8);
    const rows = view.scores.map((row) =>
      el("tr", {}, el("td", { class: "nowrap" }, row.name), el("td", { class: "muted nowrap" }, row.metric), el("td", { class: "score-line" }, scoreLine(view.steps, row.values)), shown.length ? shown.map((step) => el("td", { class: "number" }, score(row.values[view.steps.indexOf(step)]))) : el("td", { class: "number" }, score(last(row))))
    );
    const heads = shown.length ? shown.map((step) => el("th", { class: "number" }, `step ${figures.count(step)}`)) : el("th", {}, "Score");
    const parts = [el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Measure"), el("th", {}, "Metric"), el("th", {}, "Over the steps"), heads)), el("tbody", {}, rows)))];
    if (view.questions.length) {
      const asked = view.questions.map((question) => el("tr", {}, el("td", { class: question.contains === null ? "bad-text" : "good-text" }, question.contains === null ? "no" : "yes"), el("td", { class: "text muted" }, question.ask), el("td", { class: "text" }, shownAnswer(question.answer))));
      const after = view.asked_after === null ? "" : ` after step ${figures.count(view.asked_after)}`;
      parts.push(el("div", { class: "card scroll" }, el("h2", {}, `Questions${after}`), el("table", { class: "answers" }, el("thead", {}, el("tr", {}, el("th", {}, "As expected"), el("th", {}, "Question"), el("th", {}, "Answer"))), el("tbody", {}, asked))));
    }
    this.root.replaceChildren(...parts);
  }

  restyle() {}
  close() {}
}

// A score over the steps with a dot for each checkpoint; the scale is its own, from its lowest to its highest.
function scoreLine(steps, values) {
  const box = svg("svg", { class: "spark", viewBox: "0 0 240 48", width: 240, height: 48, role: "img", "aria-label": "The score over the steps" });
  const points = steps.map((step, index) => [step, values[index]]).filter(([, value]) => isKnown(value));
  if (!points.length) return box;
  const known = points.map(([, value]) => value), low = Math.min(...known), high = Math.max(...known);
  const from = points[0][0], to = points.at(-1)[0];
  const x = (step) => 6 + (228 * (step - from)) / (to - from || 1);
  const y = (value) => (high === low ? 24 : 42 - (36 * (value - low)) / (high - low));
  box.append(svg("path", { d: points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("") }));
  for (const [step, value] of points) box.append(svg("circle", { cx: x(step).toFixed(1), cy: y(value).toFixed(1), r: 2.5, fill: "var(--series-1)" }, svg("title", {}, `step ${figures.count(step)}: ${value}`)));
  return box;
}

class RecipeView {
  constructor(page) {
    this.page = page;
    this.root = el("div", {});
  }

  async refresh() {
    const view = await this.page.data.view(this.page.key, "recipe");
    const parts = [];
    for (const key of this.page.overlays) {
      const other = await this.page.data.view(key, "recipe");
      parts.push(el("div", { class: "card" }, el("h2", {}, `What ${other.run} has otherwise`), difference(view.recipe || "", other.recipe || "")));
    }
    if (view.recipe) parts.push(el("div", { class: "card" }, el("h2", {}, "The recipe, as it was resolved"), el("pre", {}, view.recipe)));
    else parts.push(el("div", { class: "card" }, emptyState("No recipe here", "This folder holds no recipe.yaml.")));
    const versions = Object.entries(view.versions);
    if (versions.length) parts.push(el("div", { class: "card" }, el("h2", {}, "What ran it"), el("table", {}, [...versions, ...Object.entries(view.plugins)].map(([name, version]) => el("tr", {}, el("td", { class: "muted nowrap" }, name), el("td", { class: "mono spread" }, String(version)))))));
    this.root.replaceChildren(...parts);
  }

  restyle() {}
  close() {}
}

// Lines that only one of two recipes has; the order of keys is the same in all of them.
function difference(here, there) {
  const own = new Set(here.split("\n")), other = new Set(there.split("\n"));
  const rows = [...here.split("\n").filter((line) => !other.has(line)).map((line) => ["- ", line, "bad-text"]), ...there.split("\n").filter((line) => !own.has(line)).map((line) => ["+ ", line, "good-text"])];
  return rows.length ? el("pre", {}, rows.map(([sign, line, shade]) => el("span", { class: shade, style: { display: "block" } }, sign + line))) : el("p", {}, "Nothing: the recipes are equal.");
}
