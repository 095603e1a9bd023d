// Values under the pointer, toggles, sorting, refreshing; the page is complete without it.
const hidden = new Set(), order = {column: null, descending: false};
let filter = '', theme = 'auto';
try { theme = localStorage.getItem('tekoa-theme') || theme; } catch { /* No storage for files. */ }
const MAX_ROWS = 8, SAME_STEP = 4;  // Long curves have points at other steps, a little apart.

function showTheme() {
  const root = document.documentElement;
  if (theme === 'auto') delete root.dataset.theme; else root.dataset.theme = theme;
  document.querySelector('.theme span').textContent = theme;
}
document.querySelector('.theme').addEventListener('click', () => {
  theme = {auto: 'light', light: 'dark', dark: 'auto'}[theme] || 'auto';
  try { localStorage.setItem('tekoa-theme', theme); } catch { /* It holds until the page closes. */ }
  showTheme();
});

const isOff = (card, name) => hidden.has(card.dataset.key + name) || hidden.has('run ' + name)
  || (filter && card.closest('main').querySelector('.runs') && !name.toLowerCase().includes(filter));

function applyHidden() {
  for (const card of document.querySelectorAll('.card[data-key]'))
    for (const path of card.querySelectorAll('path[data-name]'))
      path.classList.toggle('hid', Boolean(isOff(card, path.dataset.name)));
  for (const row of document.querySelectorAll('tr[data-run]')) {
    row.hidden = filter !== '' && !row.dataset.run.toLowerCase().includes(filter);
    row.querySelector('input').checked = !hidden.has('run ' + row.dataset.run);
  }
}

function readCurve(path) {
  const places = path.getAttribute('d').split(/[ML]/).slice(1);
  const values = path.dataset.values.split(';');
  return {path, name: path.dataset.name, points: places.map((place, i) => {
    const [x, y] = place.split(' ').map(Number), [step, value] = values[i].split(' ');
    return {x, y, step: Number(step), value}; })};
}
const nearest = (points, x) => points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);

function setUpChart(card, svg) {
  let all = null, at = null;
  const cursor = svg.querySelector('.cursor'), box = svg.viewBox.baseVal;
  const tip = card.appendChild(Object.assign(document.createElement('div'), {className: 'tip'}));
  tip.setAttribute('role', 'status');
  const visible = () => {
    all ||= [...svg.querySelectorAll('path[data-values]')].map(readCurve).filter(c => c.points.length);
    return all.filter(curve => !curve.path.classList.contains('hid'));
  };
  const hide = () => { at = null; tip.style.display = 'none'; cursor.style.visibility = 'hidden';
    all?.forEach(curve => curve.path.classList.remove('hot')); };
  const show = (x, y) => {
    const curves = visible(); if (!curves.length) return hide();
    const near = curves.map(curve => ({curve, point: nearest(curve.points, x)}));
    at = near.map(pair => pair.point).reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
    let rows = near.filter(pair => Math.abs(pair.point.x - at.x) < SAME_STEP);
    if (y !== null) rows.sort((a, b) => Math.abs(a.point.y - y) - Math.abs(b.point.y - y));
    const more = rows.length - MAX_ROWS; rows = rows.slice(0, MAX_ROWS);
    all.forEach(curve => curve.path.classList.toggle('hot', curves.length > 1 && curve === rows[0].curve));
    rows.sort((a, b) => a.point.y - b.point.y);
    for (const [name, value] of [['x1', at.x], ['x2', at.x], ['y1', 12], ['y2', box.height - 26]])
      cursor.setAttribute(name, value);
    cursor.style.visibility = 'visible';
    tip.replaceChildren('step ' + at.step.toLocaleString('en'), ...rows.map(({curve, point}) => {
      const row = document.createElement('div'); row.textContent = curve.name + '  ' + point.value;
      row.style.color = getComputedStyle(curve.path).color; return row; }));
    if (more > 0) tip.append(`and ${more} more`);
    tip.style.display = 'block';
    const seen = svg.getBoundingClientRect(), frame = card.getBoundingClientRect();
    const left = seen.left - frame.left + at.x * seen.width / box.width;
    const room = card.clientWidth - tip.offsetWidth - 6;
    tip.style.left = Math.max(6, left + 12 > room ? Math.min(room, left - tip.offsetWidth - 12) : left + 12) + 'px';
    tip.style.top = (seen.top - frame.top + 14) + 'px';
  };
  const follow = event => { const seen = svg.getBoundingClientRect(), scale = box.width / seen.width;
    show((event.clientX - seen.left) * scale, (event.clientY - seen.top) * scale); };
  svg.addEventListener('pointermove', follow); svg.addEventListener('pointerdown', follow);
  svg.addEventListener('pointerleave', hide); svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', event => {
    if (event.key === 'Escape') return hide();
    const xs = [...new Set(visible().flatMap(c => c.points.map(p => p.x)))].sort((a, b) => a - b);
    if (!xs.length) return;
    const i = at ? xs.indexOf(at.x) : -1;
    const next = {ArrowRight: i + 1, ArrowLeft: i < 0 ? xs.length - 1 : i - 1, Home: 0,
      End: xs.length - 1}[event.key];
    if (next === undefined) return;
    event.preventDefault(); show(xs[Math.max(0, Math.min(xs.length - 1, next))], null);
  });
}

function setUpLegend(card) {
  for (const button of card.querySelectorAll('.legend button')) {
    const key = card.dataset.key + button.dataset.name;
    button.setAttribute('aria-pressed', String(!hidden.has(key)));
    button.addEventListener('click', () => {
      if (!hidden.delete(key)) hidden.add(key);
      button.setAttribute('aria-pressed', String(!hidden.has(key))); applyHidden(); });
  }
}

function sortRows() {
  const body = document.querySelector('.runs tbody'); if (!body || order.column === null) return;
  const value = row => row.children[order.column].dataset.v;
  const compare = (a, b) => { const [x, y] = [value(a), value(b)];
    if (x === '' || y === '') return (x === '') - (y === '');  // Empty cells stay last.
    const difference = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return order.descending ? -difference : difference; };
  body.append(...[...body.rows].sort(compare));
  document.querySelectorAll('.runs th').forEach((th, i) => i === order.column
    ? th.setAttribute('aria-sort', order.descending ? 'descending' : 'ascending')
    : th.removeAttribute('aria-sort'));
}

function setUpRuns() {
  for (const button of document.querySelectorAll('.runs th button'))
    button.addEventListener('click', () => { const column = Number(button.dataset.column);
      order.descending = order.column === column && !order.descending;
      order.column = column; sortRows(); });
  for (const row of document.querySelectorAll('tr[data-run]')) {
    row.querySelector('input').addEventListener('change', event => {
      const key = 'run ' + row.dataset.run;
      if (event.target.checked) hidden.delete(key); else hidden.add(key); applyHidden(); });
    row.addEventListener('pointerenter', () => document.querySelectorAll('path[data-name]').forEach(
      path => path.classList.toggle('hot', path.dataset.name === row.dataset.run)));
    row.addEventListener('pointerleave', () => document.querySelectorAll('.hot').forEach(
      path => path.classList.remove('hot')));
  }
  for (const button of document.querySelectorAll('.filter button'))
    button.addEventListener('click', () => {
      for (const row of document.querySelectorAll('tr[data-run]:not([hidden])'))
        if (button.dataset.all === 'true') hidden.delete('run ' + row.dataset.run);
        else hidden.add('run ' + row.dataset.run);
      applyHidden(); });
  const input = document.querySelector('.filter input');
  if (input) { input.value = filter;
    input.addEventListener('input', () => { filter = input.value.toLowerCase(); applyHidden(); }); }
  sortRows();
}

function setUp() {
  for (const card of document.querySelectorAll('.card')) {
    const svg = card.querySelector('svg.chart'); if (!svg) continue;
    card.dataset.key = card.querySelector('h3').textContent + ' ';
    setUpChart(card, svg); setUpLegend(card);
  }
  setUpRuns(); applyHidden();
}

async function refresh(tag) {
  const note = document.querySelector('.live');
  try {
    const reply = await fetch(location.href, {headers: tag ? {'If-None-Match': tag} : {}, cache: 'no-store'});
    if (reply.status === 200) {
      const parsed = new DOMParser().parseFromString(await reply.text(), 'text/html');
      const isTyping = document.activeElement?.matches('.filter input');
      if (tag) { document.querySelector('main').replaceWith(parsed.querySelector('main')); setUp(); }
      if (tag && isTyping) document.querySelector('.filter input').focus();
      tag = reply.headers.get('ETag');
    }
    note.textContent = 'live'; note.classList.remove('lost');
  } catch { note.textContent = 'not connected'; note.classList.add('lost'); }
  setTimeout(refresh, 2000, tag);
}

showTheme(); setUp();
if (document.documentElement.dataset.live) refresh(null);
