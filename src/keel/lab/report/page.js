"use strict";
function readCharts() {
  const data = JSON.parse(document.getElementById("charts").textContent);
  const show = (value) => (value === null ? "no number" : Number(value.toPrecision(4)).toString());
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = data.charts[Number(figure.dataset.chart)];
    const svg = figure.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const out = figure.querySelector("output");
    const [low, high, start, end] = svg.dataset.x.split(",").map(Number);
    const read = (event) => {
      const box = svg.getBoundingClientRect();
      const pixel = ((event.clientX - box.left) / box.width) * data.width;
      const share = Math.min(1, Math.max(0, (pixel - start) / (end - start)));
      const wanted = low + share * (high - low);
      let step = null;
      for (const series of chart.series)
        for (const x of series.x)
          if (step === null || Math.abs(x - wanted) < Math.abs(step - wanted)) step = x;
      if (step === null) return;
      const at = high > low ? start + ((step - low) / (high - low)) * (end - start) : (start + end) / 2;
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      const parts = [];
      for (const series of chart.series) {
        const index = series.x.indexOf(step);
        if (index < 0) continue;
        const error = series.e[index];
        parts.push(series.label + " " + show(series.y[index]) + (error === null || error === undefined ? "" : " ± " + show(error)));
      }
      const place = chart.names.length ? chart.names[step] : chart.across + " " + show(step);
      out.textContent = place + ": " + parts.join(", ");
    };
    svg.addEventListener("pointermove", read);
    svg.addEventListener("pointerdown", read);
    svg.addEventListener("pointerleave", () => {
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
      out.textContent = "";
    });
  }
}
readCharts();
(function () {
  let chosen = null;
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".t");
    if (!token) return;
    if (chosen) chosen.classList.remove("on");
    chosen = token;
    token.classList.add("on");
    const place = token.closest(".turn, .problem");
    const text = JSON.stringify(token.textContent) + ": " + (token.title || (token.classList.contains("x") ? "not sampled by the policy" : "KL was not measured"));
    let out = place.querySelector(":scope > output.token-kl");
    if (!out) {
      out = document.createElement("output");
      out.className = "token-kl";
      place.appendChild(out);
    }
    out.textContent = text;
  });
})();
