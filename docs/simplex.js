/* The KL term on the simplex of three tokens: draws what scripts/pages/simplex.py computed with the functions of keel verify. */
"use strict";
(function () {
  const data = window.simplexData, root = document.getElementById("simplex");
  const WIDTH = 520, HEIGHT = 470, CORNERS = [[260, 30], [30, 428], [490, 428]], NAMES = ["A", "B", "C"];
  const SVG = "http://www.w3.org/2000/svg";
  const element = (name, attributes, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const draw = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };

  // Policies and gradients have three parts; of policies the first two are stored, of gradients too: these add up to zero.
  const policies = pairs(data.policies).map(([a, b]) => [a, b, 1 - a - b]);
  const gradient = (flat) => pairs(flat).map(([a, b]) => [a, b, -a - b]);
  const ofReward = gradient(data.reward), fields = data.fields.map((field) => gradient(field.gradient));
  const trueKl = fields[data.pairings["exact|loss|plain|on"].field];
  function pairs(flat) {
    return Array.from({ length: flat.length / 2 }, (_, n) => [flat[2 * n], flat[2 * n + 1]]);
  }
  const dot = (x, y) => x.reduce((sum, value, n) => sum + value * y[n], 0);
  const size = (x) => Math.sqrt(dot(x, x));
  const place = (policy) => [0, 1].map((axis) => policy.reduce((sum, p, n) => sum + p * CORNERS[n][axis], 0));
  const kl = (policy) => policy.reduce((sum, p, n) => sum + (p > 0 ? p * Math.log(p / data.reference[n]) : 0), 0);
  const shown = (policy) => "(" + policy.map((p) => Math.max(0, p).toFixed(2)).join(", ") + ")";

  // -- controls
  const select = (label, options) => {
    const box = element("select", { "aria-label": label });
    for (const [value, text] of options) box.append(element("option", { value }, text));
    box.addEventListener("change", update);
    return box;
  };
  const estimator = select("estimator", data.estimators.map((name) => [name, name]));
  const placement = select("placement", ["loss", "reward", "advantage"].map((name) => [name, name]));
  const form = select("gradient in the loss", ["auto", "plain", "rho"].map((name) => [name, name]));
  const sampling = select("sampling", [["on", "on-policy"], ["off", "off-policy"]]);
  const arrows = select("arrows", [["total", "reward and β·KL term"], ["kl", "KL term alone"]]);
  const beta = element("input", { type: "range", min: 0, max: data.betas.length - 1, step: 1, "aria-label": "β" });
  const betaText = element("output", {});
  beta.addEventListener("input", update);
  [estimator.value, placement.value, sampling.value, beta.value] = ["k3", "reward", "on", 4];
  const labelled = (text, ...parts) => element("label", {}, element("span", {}, text), ...parts);
  const controls = element("div", { class: "controls" },
    labelled("estimator", estimator), labelled("placement", placement), labelled("gradient", form),
    labelled("samples", sampling), labelled("β", beta, betaText), labelled("arrows", arrows));

  // -- picture
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "application" });
  picture.setAttribute("aria-label", "Policies over three tokens. Arrow keys move from policy to policy.");
  const layer = draw("g", {}), cursor = draw("circle", { r: 11, class: "cursor" });
  picture.append(draw("path", { d: `M${CORNERS.map((corner) => corner.join(" ")).join("L")}Z`, class: "edge" }));
  const words = [["A pays 1", 0, "middle", -12], ["B pays 0", 1, "start", 26], ["C pays 0", 2, "end", 26]];
  for (const [text, n, anchor, lower] of words) {
    const x = CORNERS[n][0] + (anchor === "start" ? -20 : anchor === "end" ? 20 : 0);
    picture.append(draw("text", { x, y: CORNERS[n][1] + lower, "text-anchor": anchor }, text));
  }
  picture.append(layer, cursor);
  const [verdict, counted, ended, read] = ["p", "p", "p", "p"].map((name) => element(name, {}));
  read.setAttribute("aria-live", "polite");
  const legend = element("p", { class: "legend" });
  for (const [kind, text] of [["along", "the true gradient's direction"], ["off", "another direction"],
    ["away", "more than 90° off"], ["none", "no gradient"], ["path", "descent from the reference"]])
    legend.append(element("span", { class: kind }, text));
  root.replaceChildren(controls, element("div", { class: "view" }, picture, element("div", { class: "words" }, verdict, counted, ended, read, legend)));
  let at = nearest(...place(data.reference)); // the policy that is read
  let now = [], wanted = [], terms = []; // at every policy: what is drawn, what would be right, the KL term

  function kindOf(have, right) {
    if (size(have) < 1e-6) return "none";
    const cosine = dot(have, right) / (size(have) * size(right));
    return cosine > 0.999 ? "along" : cosine > 0 ? "off" : "away";
  }

  /* Where a step of descent on the logits moves the policy, in the picture. */
  function velocity(policy, gradient) {
    const mean = dot(policy, gradient);
    const moved = policy.map((p, n) => -p * (gradient[n] - mean));
    return [0, 1].map((axis) => moved.reduce((sum, m, n) => sum + m * CORNERS[n][axis], 0));
  }

  function update() {
    form.disabled = placement.value !== "loss";
    const chosen = [estimator.value, placement.value, form.disabled ? "auto" : form.value, sampling.value];
    const pairing = data.pairings[chosen.join("|")], b = data.betas[beta.value], alone = arrows.value === "kl";
    betaText.textContent = b;
    beta.setAttribute("aria-valuetext", b);
    const add = (field) => field.map((g, n) => g.map((part, k) => (alone ? part : ofReward[n][k] + b * part)));
    terms = fields[pairing.field];
    [now, wanted] = [add(terms), add(trueKl)];

    layer.replaceChildren();
    const moves = now.map((g, n) => velocity(policies[n], g)), longest = Math.max(...moves.map(size));
    const counts = { along: 0, off: 0, away: 0, none: 0 };
    policies.forEach((policy, n) => {
      const [x, y] = place(policy), kind = kindOf(now[n], wanted[n]);
      counts[kind] += 1;
      if (kind === "none") return layer.append(draw("circle", { cx: x, cy: y, r: 3, class: "none" }));
      const length = 9 + 13 * Math.sqrt(size(moves[n]) / longest), angle = Math.atan2(moves[n][1], moves[n][0]);
      const tip = [x + length * Math.cos(angle), y + length * Math.sin(angle)];
      const barb = (turn) => [tip[0] - 5 * Math.cos(angle + turn), tip[1] - 5 * Math.sin(angle + turn)].map((v) => v.toFixed(1)).join(" ");
      const start = `${x.toFixed(1)} ${y.toFixed(1)}`, end = tip.map((v) => v.toFixed(1)).join(" ");
      layer.append(draw("path", { d: `M${start}L${end}M${barb(0.5)}L${end}L${barb(-0.5)}`, class: kind }));
    });
    const path = pairs(data.fields[pairing.field].paths[beta.value]).map(([a, c]) => [a, c, Math.max(0, 1 - a - c)]);
    const last = path[path.length - 1], best = data.optimum[beta.value];
    layer.append(draw("path", { d: "M" + path.map((p) => place(p).map((v) => v.toFixed(1)).join(" ")).join("L"), class: "path" }));
    mark("ref", data.reference, "reference");
    if (sampling.value === "off") mark("sampler", data.sampler, "sampler");
    mark("best", best, "optimum");
    mark("end", last, "");

    const where = placement.value === "loss" ? `loss, gradient ${form.value}` : placement.value;
    verdict.replaceChildren(element("b", {}, `${estimator.value} in the ${where}, ${sampling.selectedOptions[0].text}.`),
      ` Expected gradient of the KL term: ${pairing.means}.${pairing.refused ? " Keel refuses this pairing." : ""}`);
    const of = alone ? "∇KL(policy‖ref)" : "the gradient of −E[R] + β·KL(policy‖ref)";
    counted.textContent = `Arrows at ${policies.length} policies, compared with ${of}: ${counts.along} in its direction, ` +
      `${counts.off} in another, ${counts.away} more than 90° off, ${counts.none} without a gradient.`;
    const near = size(last.map((p, n) => p - best[n])) < 0.01;
    const told = (policy) => `${shown(policy)}, reward ${dot(policy, data.rewards).toFixed(2)}, KL ${kl(policy).toFixed(2)}`;
    ended.textContent = `At β = ${b}, ${data.steps} steps of descent from the reference end at ${told(last)}. ` +
      (near ? "That is the optimum." : `The optimum is ${told(best)}.`);
    point();
  }

  function mark(kind, policy, text) {
    const [x, y] = place(policy);
    layer.append(draw("path", { d: { ref: "M-6-6h12v12h-12z", sampler: "M0-8l8 8-8 8-8-8z", best: "M0-10a10 10 0 1 0 .1 0z", end: "M0-5a5 5 0 1 0 .1 0z" }[kind],
      transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: `mark ${kind}` }));
    if (text) layer.append(draw("text", { x: x + 13, y: y + 5, class: "name" }, text));
  }

  function point() {
    const policy = policies[at], [x, y] = place(policy);
    cursor.setAttribute("cx", x);
    cursor.setAttribute("cy", y);
    const right = trueKl[at], term = terms[at], cosine = dot(term, right) / (size(term) * size(right));
    const how = size(term) < 1e-6 ? "has no gradient" :
      `has cosine ${cosine.toFixed(2).replace("-", "−")} with ∇KL(policy‖ref) and ${(size(term) / size(right)).toPrecision(2)} times its size`;
    read.textContent = `Policy ${shown(policy)}: KL ${data.kl[at].toFixed(2)} nats; the KL term ${how}.`;
  }

  /* The nearest policy to a place in the picture, among those that `allowed` picks. */
  function nearest(x, y, allowed = () => true) {
    const distance = (n) => Math.hypot(place(policies[n])[0] - x, place(policies[n])[1] - y);
    return policies.map((_, n) => n).filter(allowed).sort((m, n) => distance(m) - distance(n))[0];
  }

  const follow = (event) => {
    const box = picture.getBoundingClientRect();
    at = nearest(((event.clientX - box.left) / box.width) * WIDTH, ((event.clientY - box.top) / box.height) * HEIGHT);
    point();
  };
  picture.addEventListener("pointermove", follow);
  picture.addEventListener("pointerdown", follow);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  picture.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const [x, y] = place(policies[at]), ahead = (n) => dot([place(policies[n])[0] - x, place(policies[n])[1] - y], step) > 1;
    at = nearest(x + 30 * step[0], y + 30 * step[1], ahead) ?? at;
    point();
  });
  update();
})();
