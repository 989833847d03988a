"use strict";

// Everything that comes from the cluster is put in as text: nobody's host name becomes markup.
const INTERVAL = 500; // milliseconds between two looks
const STATES = ["running", "waiting", "stuck", "lost", "left"];
const place = (id) => document.getElementById(id);

function cell(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function row(rank, straggler) {
  const made = document.createElement("tr");
  made.dataset.rank = String(rank.rank);
  made.className = STATES.includes(rank.state) ? rank.state : "";
  if (rank.rank === straggler && rank.gone === null) made.classList.add("straggler");
  made.append(...rank.cells.map((text) => cell("td", text)));
  made.children[1].classList.add("state");
  return made;
}

function show(board) {
  place("cluster").textContent = board.cluster;
  place("title").textContent = board.title;
  place("sentence").textContent = board.sentence;
  place("headings").replaceChildren(...board.headings.map((text) => {
    const made = cell("th", text);
    made.scope = "col";
    return made;
  }));
  place("ranks").replaceChildren(...board.ranks.map((rank) => row(rank, board.straggler)));
  document.title = `nexar: ${board.title}`;
}

function trouble(text) {
  document.body.classList.toggle("stale", text !== "");
  place("trouble").hidden = text === "";
  place("trouble").textContent = text;
}

async function look() {
  try {
    const answer = await fetch("board.json", { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    show(await answer.json());
    trouble("");
  } catch (error) {
    trouble(`The seed does not answer (${error.message}): it has ended, or cannot be reached. What follows is old.`);
  }
  setTimeout(look, INTERVAL);
}

look();
