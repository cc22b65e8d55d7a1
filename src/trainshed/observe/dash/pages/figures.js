"use strict";
// Numbers as people read them.

const NONE = "–";
const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

const figures = {
  count: (value) => (isKnown(value) ? Math.round(value).toLocaleString("en-US") : NONE),
  percent: (value, digits = 1) => (isKnown(value) ? `${(100 * value).toFixed(digits)}%` : NONE),
  loss: (value) => (isKnown(value) ? value.toFixed(4) : NONE),
  gib: (value) => (isKnown(value) ? `${value.toFixed(value < 10 ? 2 : 1)} GiB` : NONE),

  short(value) {
    if (!isKnown(value)) return NONE;
    const size = Math.abs(value);
    for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit * (name === "k" ? 10 : 1)) return `${trimZeros((value / unit).toPrecision(3))}${name}`;
    return size >= 100 || Number.isInteger(value) ? String(Math.round(value)) : trimZeros(value.toPrecision(3));
  },

  // For curves of any size: 2.3481, 0.00031, 12,400.
  any(value) {
    if (!isKnown(value)) return NONE;
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3) return value.toExponential(2);
    if (size >= 1e6) return figures.short(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return trimZeros(value.toPrecision(size >= 1 ? 5 : 4));
  },

  bytes(value) {
    if (!isKnown(value)) return NONE;
    for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (value >= unit) return `${(value / unit).toFixed(1)} ${name}`;
    return `${value} B`;
  },

  duration(seconds) {
    if (!isKnown(seconds)) return NONE;
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    if (seconds < 60) return `${Math.round(seconds)} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
    return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  },

  // Without seconds where there are minutes enough.
  rough: (seconds) => (isKnown(seconds) && seconds >= 600 && seconds < 3600 ? `${Math.round(seconds / 60)} min` : figures.duration(seconds)),

  seconds: (value) => (isKnown(value) ? (value < 1 ? `${trimZeros((value * 1000).toPrecision(3))} ms` : `${trimZeros(value.toPrecision(4))} s`) : NONE),

  ago(time) {
    if (!isKnown(time)) return NONE;
    const seconds = Math.max(0, Date.now() / 1000 - time);
    if (seconds < 8) return "now";
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
    return `${Math.round(seconds / 86400)} d ago`;
  },

  clock(time) {
    if (!isKnown(time)) return NONE;
    const date = new Date(time * 1000);
    const two = (value) => String(value).padStart(2, "0");
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  },
};

function trimZeros(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

// A line without axes; values may have gaps.
function sparkline(values) {
  const box = svg("svg", { class: "spark", viewBox: "0 0 120 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  const known = (values || []).filter(isKnown);
  if (known.length < 2) return box;
  const low = Math.min(...known), high = Math.max(...known);
  const x = (index) => (index / (values.length - 1)) * 118 + 1;
  const y = (value) => 23 - ((value - low) / (high - low || 1)) * 20;
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (!isKnown(value)) return void (pen = "M");
    path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  box.append(svg("path", { d: path }));
  return box;
}
