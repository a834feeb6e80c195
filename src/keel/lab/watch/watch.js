"use strict";
(function () {
  const live = document.getElementById("live");
  const refresh = Number(live.dataset.refresh) * 1000;
  let etag = null;
  let changed = null; // when a run last wrote something, by this page's clock
  let final = false;
  let timer = null;
  let asking = false;

  const ago = (milliseconds) => {
    const seconds = Math.max(0, Math.round(milliseconds / 1000));
    if (seconds < 90) return seconds + " s";
    return seconds < 5400 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h";
  };
  const say = (text, lost) => {
    live.textContent = text;
    live.classList.toggle("lost", Boolean(lost));
  };
  const sayAge = () => {
    if (final) say("Training has ended and the server has stopped: this page is final.");
    else if (changed !== null) say("Live · last change " + ago(Date.now() - changed) + " ago");
  };
  const folds = (place) => { // each under its title and its number among those of one title
    const counts = new Map();
    return [...place.querySelectorAll("details")].map((fold) => {
      const title = fold.querySelector("summary").textContent;
      counts.set(title, (counts.get(title) || 0) + 1);
      return [counts.get(title) + " " + title, fold];
    });
  };
  const replace = (place, html) => {
    const opened = new Map(folds(place).map(([key, fold]) => [key, fold.open]));
    place.innerHTML = html;
    for (const [key, fold] of folds(place)) if (opened.has(key)) fold.open = opened.get(key);
  };
  const ask = async (address, headers) => {
    const answer = await fetch(address, { headers, cache: "no-store" });
    if (!answer.ok && answer.status !== 304) throw new Error(await answer.text());
    return answer;
  };
  const poll = async () => {
    const answer = await ask("state", etag === null ? {} : { "If-None-Match": etag });
    if (answer.status === 304) return;
    const state = await answer.json();
    for (const section of state.sections) {
      const place = document.getElementById(section.name);
      if (place.dataset.digest === section.digest) continue;
      const part = await ask("section/" + section.name, {});
      replace(place, await part.text());
      place.dataset.digest = part.headers.get("ETag").replaceAll('"', "");
      if (section.name === "curves") readCharts();
    }
    changed = Date.now() - state.age_s * 1000;
    final = state.final;
    etag = answer.headers.get("ETag");
  };
  const turn = async () => {
    if (asking) return;
    clearTimeout(timer);
    let wait = refresh;
    if (!document.hidden) {
      asking = true;
      try {
        await poll();
        sayAge();
      } catch (error) {
        wait = 2 * refresh;
        const reason = error instanceof TypeError ? "the server has ended, or the tunnel to it is closed" : error.message;
        say("No longer live: " + reason + ". Retrying every " + ago(wait) + ".", true);
      }
      asking = false;
    }
    if (!final) timer = setTimeout(turn, wait);
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !final) turn();
  });
  turn();
})();
