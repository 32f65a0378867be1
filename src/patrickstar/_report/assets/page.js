"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
// Colors by name in each theme: pairs that a reader with color blindness can tell apart.
const COLORS = {
  light: {
    "parameters": "#3b7dd8", "gradients": "#e08a1e", "masters and optimizer states": "#7a6bc9",
    "activations and workspaces": "#3d9a78", "buffers and offloaded activations": "#3d9a78", "budget": "#b3261e",
    "phase": "#8fa3b3", "stall": "#b3261e", "host to device": "#3b7dd8", "device to host": "#7a6bc9",
    "disk read": "#3d9a78", "disk write": "#e08a1e", "update on the host": "#5d7585", "collectives": "#a04a8b",
    "disk, or other processes": "#e7eaec", "host": "#b9d2f2", "device and host": "#7fb0ea", "device": "#2c66b8",
    "device, gradients": "#e08a1e",
    "curve0": "#2c66b8", "curve1": "#b3261e", "curve2": "#2f7d60", "curve3": "#b36a0d", "curve4": "#7a6bc9", "curve5": "#a04a8b",
  },
  dark: {
    "parameters": "#6ea8f5", "gradients": "#f0a64a", "masters and optimizer states": "#a598ee",
    "activations and workspaces": "#65c6a2", "buffers and offloaded activations": "#65c6a2", "budget": "#ff8a80",
    "phase": "#6c7f8d", "stall": "#ff8a80", "host to device": "#6ea8f5", "device to host": "#a598ee",
    "disk read": "#65c6a2", "disk write": "#f0a64a", "update on the host": "#90a7b6", "collectives": "#d58cc2",
    "disk, or other processes": "#2a3237", "host": "#37506e", "device and host": "#4f86c6", "device": "#8fc0ff",
    "device, gradients": "#f0a64a",
    "curve0": "#7cb8ff", "curve1": "#ff8a80", "curve2": "#65c6a2", "curve3": "#f0a64a", "curve4": "#a598ee", "curve5": "#d58cc2",
  },
};
const root = document.documentElement;
const button = document.getElementById("theme");
const theme = () => root.dataset.theme;

function colored(value) {
  if (typeof value === "string") return value.startsWith("@") ? COLORS[theme()][value.slice(1)] : value;
  if (Array.isArray(value)) return value.length > 50 ? value : value.map(colored);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, colored(each)]));
}

// A heat map has its rows as runs of equal values.
function expanded(trace) {
  if (!trace.runs) return trace;
  const { runs, places, ...rest } = trace;
  const z = runs.map((row) => row.flatMap(([count, value]) => Array(count).fill(value)));
  return { ...rest, z, text: z.map((row) => row.map((value) => places[value])) };
}

function showKey(place, names) {
  const list = place.previousElementSibling;
  list.replaceChildren(...names.map((name) => {
    const item = document.createElement("li");
    const color = document.createElement("span");
    color.style.background = COLORS[theme()][name];
    item.append(color, name);
    return item;
  }));
}

function draw(place) {
  const figure = figures[place.dataset.figure];
  const style = getComputedStyle(root);
  const [text, line, soft] = ["--text", "--line", "--soft"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: soft, automargin: true };
  const layout = colored(figure.layout);
  const narrow = place.clientWidth < 600;
  if (figure.key) showKey(place, figure.key);
  Plotly.react(place, colored(figure.data).map(expanded), {
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    height: Math.max(place.clientHeight, 280),
    margin: { l: narrow ? 50 : 70, r: 15, t: 10, b: 50 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: text },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { align: "left" },
  }, { responsive: true, displayModeBar: false });
}

const visible = () => [...document.querySelectorAll(".picture")].filter((place) => place.offsetParent !== null);
function drawAll() { visible().forEach(draw); }

function setTheme(name) {
  root.dataset.theme = name;
  button.textContent = name === "dark" ? "Light" : "Dark";
  drawAll();
}

button.addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
for (const select of document.querySelectorAll("select")) {
  select.addEventListener("change", () => {
    for (const step of document.querySelectorAll(`.step[data-group="${select.dataset.group}"]`)) {
      step.hidden = step.id !== select.value;
    }
    drawAll();
  });
}
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
