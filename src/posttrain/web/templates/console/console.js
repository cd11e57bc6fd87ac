// The console without this script is whole: it only follows, and gives keys. What it puts into a page is HTML that the
// server drew and escaped, taken from the very page that a reload would show.
(() => {
  "use strict";
  const AGAIN = 15000, LOAD_EVERY = 10000; // milliseconds
  const base = document.body.dataset.base || "";
  const editing = () => {
    const at = document.activeElement;
    return at && at.matches("input:not([type=checkbox]), textarea, select");
  };

  // --- times -------------------------------------------------------------------------------------------------------
  const words = (seconds) => {
    const passed = Math.abs(seconds);
    for (const [word, scale] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
      const count = Math.floor(passed / scale);
      if (count) {
        const said = `${count} ${word}${count > 1 ? "s" : ""}`;
        return seconds > 0 ? `${said} ago` : `in ${said}`;
      }
    }
    return seconds > -1 ? "just now" : "in a moment";
  };
  setInterval(() => document.querySelectorAll("time[datetime]").forEach((one) => {
    const at = Date.parse(one.dateTime);
    if (at) one.textContent = words((Date.now() - at) / 1000);
  }), 20000);

  // --- chat --------------------------------------------------------------------------------------------------------
  // Each column asks for itself; an answer grows as its lines arrive.
  const chat = document.querySelector("form[data-chat]");
  const added = (column, kind, text) => {
    const one = document.createElement("p");
    one.className = kind;
    one.textContent = text;
    column.querySelector("[data-messages]").append(one);
    one.scrollIntoView({ block: "nearest" });
    return one;
  };
  const asked = async (column, message) => {
    const history = chat.elements[`history${column.dataset.talk}`];
    const mine = added(column, "mine", message), shown = added(column, "theirs", "");
    try {
      await received(column, history, message, shown);
    } catch (error) {
      mine.remove(); // the conversation continues without what has no whole answer
      shown.remove();
      throw error;
    }
  };
  const received = async (column, history, message, shown) => {
    const fields = new URLSearchParams({ form_token: chat.elements.form_token.value, history0: history.value, message });
    const url = `${base}/channels/${encodeURIComponent(column.dataset.channel)}/chat`;
    const headers = { accept: "application/x-ndjson", "content-type": "application/x-www-form-urlencoded" };
    const answer = await fetch(url, { method: "POST", body: fields, headers, credentials: "same-origin" });
    if (!answer.ok || !answer.body) throw new Error(`the server answered with status ${answer.status}`);
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const said = JSON.parse(line);
        if (said.error) throw new Error(said.error);
        if (said.text) shown.textContent += said.text;
        if (said.digest) column.querySelector("[data-digest]").textContent = said.digest.replace("sha256:", "").slice(0, 12);
      }
    }
    const both = [{ role: "user", content: message }, { role: "assistant", content: shown.textContent }];
    history.value = JSON.stringify([...JSON.parse(history.value), ...both]);
    if (!shown.textContent) shown.textContent = "(empty answer)";
  };
  if (chat) chat.elements.message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    chat.requestSubmit();
  });
  if (chat) chat.addEventListener("submit", async (event) => {
    event.preventDefault();
    const field = chat.elements.message, message = field.value.trim(), button = chat.querySelector("button");
    const wrong = chat.querySelector("[role=alert]");
    if (!message || button.disabled) return;
    button.disabled = true;
    wrong.hidden = true;
    field.value = "";
    const columns = [...document.querySelectorAll("[data-talk]")];
    const ended = await Promise.allSettled(columns.map((column) => asked(column, message)));
    const failed = ended.find((one) => one.status === "rejected");
    if (failed) { wrong.textContent = failed.reason.message; wrong.hidden = false; field.value ||= message; }
    button.disabled = false;
    field.focus();
  });

  // --- follow ------------------------------------------------------------------------------------------------------
  const parsed = async (url) => {
    const answer = await fetch(url, { credentials: "same-origin", redirect: "manual", cache: "no-store" });
    if (answer.type === "opaqueredirect" && !editing()) location.reload(); // the session is over: to where one logs in
    if (!answer.ok) throw new Error(String(answer.status));
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  };
  // What a link or a button does: focus returns to the same one only, never to the button of another request.
  const does = (one) => {
    const form = one.form ? [...new FormData(one.form)].filter(([name]) => name !== "reason").join() : "";
    return [one.tagName, one.id, one.getAttribute("href"), one.name, one.value, one.form && one.form.action, form, one.textContent].join("|");
  };
  // The same element with what the other one shows; what is open, chosen or being written stays so.
  const take = (old, fresh) => {
    if (old.innerHTML === fresh.innerHTML) return false;
    if (old.contains(document.activeElement) && editing()) return false;
    if ([...old.querySelectorAll("textarea")].some((one) => one.value.trim() !== "")) return false; // a reason is being written
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    const chosen = new Set([...old.querySelectorAll("input:checked")].map((one) => one.value));
    const at = rows().indexOf(document.activeElement), focused = document.activeElement;
    const same = at < 0 && old.contains(focused) && focused.matches("a[href], button") ? does(focused) : null;
    old.replaceChildren(...fresh.childNodes);
    old.toggleAttribute("data-over", fresh.hasAttribute("data-over"));
    const now = [...old.querySelectorAll("details")];
    if (now.length === open.length) now.forEach((one, place) => { one.open = open[place]; });
    old.querySelectorAll("input[type=checkbox]").forEach((one) => { one.checked = chosen.has(one.value); });
    filter();
    ranges.forEach(([from, to], card) => { if (cards()[card]) zoom(cards()[card], from, to); });
    const found = same && [...old.querySelectorAll("a[href], button")].find((one) => does(one) === same);
    if (at >= 0) (rows()[at] || document.body).focus({ preventScroll: true });
    else if (found) found.focus({ preventScroll: true });
    return true;
  };
  let busy = false, again = false;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const page = await parsed(location.href);
      for (const old of document.querySelectorAll("[data-live-part]")) {
        const fresh = page.getElementById(old.id);
        if (fresh) take(old, fresh);
      }
      document.title = page.title;
      load();
    } catch (error) { /* the server is away, or the session over: the next time, or a reload, tells */ }
    busy = false;
    if (again) { again = false; refresh(); }
  };
  let loaded = 0, waiting = 0;
  const load = async () => {
    const places = document.querySelectorAll("[data-load]");
    if (!places.length) return;
    const left = loaded + LOAD_EVERY - Date.now();
    if (loaded && left > 0) {
      if (!waiting) waiting = setTimeout(() => { waiting = 0; load(); }, left);
      return;
    }
    loaded = Date.now();
    for (const place of places) {
      try {
        const page = await parsed(place.dataset.load);
        if (page.body.children.length) take(place, page.body);
        place.dataset.loaded = "1";
      } catch (error) { /* the link to the report stays */ }
    }
  };
  const live = document.body.dataset.live;
  let stream = null, timer = 0;
  const shown = document.getElementById("following");
  const follow = () => {
    if (!live || stream || document.hidden) return;
    stream = new EventSource(live);
    stream.addEventListener("open", () => { if (shown) shown.hidden = false; clearInterval(timer); timer = 0; });
    stream.addEventListener("changed", refresh);
    stream.addEventListener("error", () => {
      if (shown) shown.hidden = true;
      if (stream && stream.readyState === EventSource.CLOSED) { // too many follow: ask now and then instead
        stream = null;
        if (!timer) timer = setInterval(() => { if (!document.hidden) refresh(); }, AGAIN);
      }
    });
  };
  const leave = () => {
    if (stream) stream.close();
    stream = null;
    if (shown) shown.hidden = true;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) leave(); else { follow(); if (live) refresh(); }
  });
  addEventListener("pagehide", leave);

  // --- lists -------------------------------------------------------------------------------------------------------
  const rows = () => [...document.querySelectorAll("[data-row]")].filter((one) => !one.hidden);
  const search = document.querySelector("#filter, #where, #of");
  const filter = () => {
    if (!search || search.id !== "filter") return; // the server filters the others
    const wanted = search.value.trim().toLowerCase();
    document.querySelectorAll("[data-row]").forEach((one) => {
      one.hidden = wanted !== "" && !(one.dataset.text || "").includes(wanted);
    });
  };
  if (search) search.addEventListener("input", filter);
  const step = (by) => {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((one) => one === document.activeElement || one.contains(document.activeElement));
    const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))];
    next.tabIndex = -1;
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  };

  // --- zoom --------------------------------------------------------------------------------------------------------
  // Dragging across a curve shows a part of the steps in all curves of the card; a double click shows all of them.
  const ranges = new Map(); // the place of a card on the page -> the first and last step that it shows
  const cards = () => [...new Set([...document.querySelectorAll("svg.axes")].map((one) => one.closest(".card") || one.parentElement))];
  const all = (card, from, to) => [...card.querySelectorAll("svg.axes")].every(
    (one) => from <= Number(one.dataset.first) && to >= Number(one.dataset.last));
  const zoom = (card, from, to) => {
    if (all(card, from, to)) ranges.delete(cards().indexOf(card)); else ranges.set(cards().indexOf(card), [from, to]);
    card.querySelectorAll("svg.axes").forEach((one) => show(one, from, to));
  };
  const show = (one, from, to) => {
    const plot = one.querySelector(".plot"), first = Number(one.dataset.first), last = Number(one.dataset.last);
    const left = plot.x.baseVal.value, width = plot.width.baseVal.value, height = plot.height.baseVal.value;
    const whole = from <= first && to >= last, scale = width / ((last - first) || 1);
    plot.style.overflow = whole ? "" : "hidden";
    plot.setAttribute("viewBox", `${left + (from - first) * scale} 0 ${(to - from) * scale} ${height}`);
    plot.querySelectorAll("text").forEach((text) => { text.style.visibility = whole ? "" : "hidden"; }); // would be stretched
    one.querySelectorAll("text.step, text.range").forEach((text) => {
      if (text.classList.contains("range")) text.remove(); else text.style.visibility = whole ? "" : "hidden";
    });
    if (whole) return;
    for (const [step, x, anchor] of [[from, left, "start"], [to, left + width, "end"]]) {
      const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      text.textContent = String(Math.round(step));
      for (const [key, value] of [["class", "range"], ["x", x], ["y", height + 12], ["text-anchor", anchor]]) text.setAttribute(key, value);
      one.append(text);
    }
  };
  const stepAt = (one, event) => { // the step under the pointer, by what the curve shows now
    const plot = one.querySelector(".plot"), box = plot.getScreenCTM(), view = plot.viewBox.baseVal;
    const inside = (event.clientX - box.e) / box.a, left = plot.x.baseVal.value, width = plot.width.baseVal.value;
    const at = Math.min(Math.max(inside, view.x), view.x + view.width);
    return Number(one.dataset.first) + (at - left) / width * (Number(one.dataset.last) - Number(one.dataset.first));
  };
  let drag = null;
  document.addEventListener("pointerdown", (event) => {
    const one = event.target.closest && event.target.closest("svg.axes");
    if (one && event.button === 0) { drag = { one, from: stepAt(one, event) }; event.preventDefault(); }
  });
  document.addEventListener("pointerup", (event) => {
    const began = drag;
    drag = null;
    if (!began || !began.one.isConnected) return;
    const { one, from } = began, to = stepAt(one, event), card = one.closest(".card") || one.parentElement;
    if (Math.abs(to - from) >= 1) zoom(card, Math.min(from, to), Math.max(from, to));
  });
  addEventListener("pointercancel", () => { drag = null; });
  const narrow = (by) => cards().forEach((card, place) => { // 0: all steps; the newest steps stay in view
    const { first, last } = card.querySelector("svg.axes").dataset;
    const [from, to] = ranges.get(place) || [Number(first), Number(last)], width = (to - from) * by;
    const end = by > 1 ? Math.min(Number(last), to + (to - from) / 2) : to;
    if (by === 0) zoom(card, Number(first), Number(last));
    else if (width >= 1) zoom(card, Math.max(Number(first), end - width), end);
  });
  document.addEventListener("dblclick", (event) => {
    const one = event.target.closest && event.target.closest("svg.axes");
    if (one) zoom(one.closest(".card") || one.parentElement, Number(one.dataset.first), Number(one.dataset.last));
  });
  document.body.classList.add("zooming"); // shows the hint

  // --- keys --------------------------------------------------------------------------------------------------------
  const keys = document.getElementById("keys");
  let going = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (editing()) {
      if (event.key === "Escape") document.activeElement.blur();
      return;
    }
    if (keys && keys.open) return;
    const at = document.activeElement, row = at && at.matches("[data-row]") ? at : null;
    if (going && Date.now() - going < 1500 && base) {
      going = 0;
      if (event.key === "r") { location.href = `${base}/runs`; event.preventDefault(); return; }
      if (event.key === "a") { location.href = `${base}/approvals`; event.preventDefault(); return; }
      if (event.key === "c") { location.href = `${base}/channels`; event.preventDefault(); return; }
    }
    const does = {
      j: () => step(1), k: () => step(-1),
      ArrowDown: row ? () => step(1) : null, ArrowUp: row ? () => step(-1) : null,
      Enter: row ? () => { const link = row.querySelector("a[href]"); if (link) link.click(); } : null,
      x: row ? () => { const box = row.querySelector("input[type=checkbox]"); if (box) box.click(); } : null,
      "/": search ? () => { search.focus(); search.select(); } : null,
      g: () => { going = Date.now(); },
      "+": () => narrow(0.5), "-": () => narrow(2), "0": () => narrow(0),
      "?": keys ? () => keys.showModal() : null,
    }[event.key];
    if (does) { event.preventDefault(); does(); }
  });
  document.addEventListener("click", (event) => {
    document.querySelectorAll("details.menu[open]").forEach((one) => { if (!one.contains(event.target)) one.open = false; });
  });

  filter();
  load();
  follow();
})();
