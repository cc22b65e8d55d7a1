"use strict";
// Elements are made by hand and texts set as texts: nothing that a run wrote is ever read as HTML.

function el(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// As `replaceChildren`, without what is not there.
function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

function emptyState(title, ...hint) {
  return el("div", { class: "empty" }, el("strong", {}, title), el("p", {}, hint));
}

function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", role: "radio", "aria-checked": String(value === chosen), onclick: () => onChoose(value) }, text)
  );
  return el("div", { class: "choice", role: "radiogroup", "aria-label": label }, buttons);
}

function toggle(text, pressed, onToggle, title) {
  return el("button", { type: "button", "aria-pressed": String(pressed), title, onclick: onToggle }, text);
}

// The small text beside the pointer.
const tip = {
  element: null,
  show(text, event) {
    if (!this.element) document.body.append((this.element = el("div", { class: "tip", role: "status" })));
    this.element.textContent = text;
    this.element.classList.remove("hidden");
    const { width, height } = this.element.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, innerWidth - width - 8);
    const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
    this.element.style.left = `${Math.max(8, x)}px`;
    this.element.style.top = `${Math.max(8, y)}px`;
  },
  hide() {
    if (this.element) this.element.classList.add("hidden");
  },
};

// A canvas needs colours as the theme has them now.
function colour(name) {
  const probe = el("span", { style: { color: `var(--${name})`, display: "none" } });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function withAlpha(rgb, alpha) {
  const parts = rgb.match(/[\d.]+/g) || [0, 0, 0];
  const scale = rgb.startsWith("color(") ? 255 : 1;
  return `rgba(${parts.slice(0, 3).map((part) => Math.round(part * scale)).join(",")},${alpha})`;
}

function remember(name, value) {
  try {
    localStorage.setItem(`trainshed.${name}`, JSON.stringify(value));
  } catch {
    // A page from a disk may have no storage.
  }
}

function recall(name, otherwise) {
  try {
    const text = localStorage.getItem(`trainshed.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}
