// Wiring only: unpacks plotly and its figures, gives it those in the page's colours, and shows the plan that the slider is at.
"use strict";
const slider = document.getElementById("limit");
let figures, shown = 0;

async function unpacked(name) {
  const bytes = Uint8Array.from(atob(document.getElementById(name).textContent), (one) => one.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const narrow = document.body.clientWidth < 700;
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
  const found = {
    ...layout,
    autosize: true,
    height: narrow ? 1.2 * layout.height : layout.height,
    dragmode: narrow ? false : "zoom",
    font: { color: colour("--text"), family: style.fontFamily, size: narrow ? 11 : 13 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 12 }, align: "left" },
    legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 },
    margin: { l: 50, r: 10, t: 30, b: 40 },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
  found.annotations = (layout.annotations || []).map((note) => ({
    ...note, bgcolor: colour("--page"), bordercolor: colour("--line"), arrowcolor: colour("--text"),
  }));
  return found;
}

function draw(name, figure) {
  const place = document.getElementById(name);
  if (place && figure) {
    const line = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
    const data = figure.data.map((trace) => (trace.meta === "text"
      ? { ...trace, line: { ...trace.line, color: line }, marker: { ...trace.marker, color: line } } : { ...trace }));
    return Plotly.react(place, data, themed(figure.layout), { displayModeBar: false, responsive: true });
  }
}

function show(index) {
  shown = index;
  document.querySelectorAll("[data-plan]").forEach((part) => { part.hidden = Number(part.dataset.plan) !== index; });
  const plan = figures.plans[index];
  for (const [name, figure] of Object.entries(plan)) {
    draw(name, figure);
    const place = document.getElementById(name);
    if (place.dataset.labels) place.setAttribute("aria-label", JSON.parse(place.dataset.labels)[index]);
  }
  if (figures.frontier) {
    const [limit, speed] = figures.points[index];
    figures.frontier.data[0] = { ...figures.frontier.data[0], x: [limit], y: [speed] };
    draw("frontier", figures.frontier);
  }
  if (slider) {
    const text = JSON.parse(slider.dataset.labels)[index];
    slider.setAttribute("aria-valuetext", text);
    document.getElementById("limit-text").textContent = text;
  }
}

async function start() {
  figures = JSON.parse(await unpacked("figures"));
  const library = document.createElement("script");
  library.textContent = await unpacked("plotly");
  document.head.append(library);
  show(slider ? Number(slider.value) : 0);
  if (slider) slider.addEventListener("input", () => show(Number(slider.value)));
  for (const query of ["(prefers-color-scheme: dark)", "print", "(max-width: 700px)"]) {
    matchMedia(query).addEventListener("change", () => show(shown));
  }
}

start();
