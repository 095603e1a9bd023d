// Shows step and values under the pointer; the page is complete without it.
for (const card of document.querySelectorAll('.card')) {
  const svg = card.querySelector('svg.chart'); if (!svg) continue;
  const curves = [...svg.querySelectorAll('path[data-points]')].map(path => ({
    name: path.dataset.name, color: getComputedStyle(path).color,
    points: JSON.parse(path.dataset.points)})).filter(curve => curve.points.length);
  const cursor = svg.querySelector('.cursor');
  const tip = card.appendChild(Object.assign(document.createElement('div'), {className: 'tip'}));
  const box = svg.viewBox.baseVal;
  svg.addEventListener('pointerleave', () => {
    tip.style.display = 'none'; cursor.style.visibility = 'hidden'; });
  svg.addEventListener('pointermove', event => {
    const seen = svg.getBoundingClientRect(), scale = box.width / seen.width;
    const x = (event.clientX - seen.left) * scale;
    const near = curves.map(curve => curve.points.reduce(
      (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const best = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    cursor.setAttribute('x1', best[0]); cursor.setAttribute('x2', best[0]);
    cursor.setAttribute('y1', 12); cursor.setAttribute('y2', box.height - 26);
    cursor.style.visibility = 'visible';
    tip.replaceChildren(document.createTextNode('step ' + best[2].toLocaleString('en')));
    near.forEach((point, i) => { if (point[2] !== best[2]) return;
      const row = document.createElement('div'); row.textContent = curves[i].name + '  ' + point[3];
      row.style.color = curves[i].color; tip.append(row); });
    tip.style.display = 'block';
    const left = svg.offsetLeft + card.clientLeft + best[0] / scale, room = card.clientWidth;
    tip.style.left = Math.min(left + 12, room - tip.offsetWidth - 6) + 'px';
    tip.style.top = (seen.top - card.getBoundingClientRect().top + 14) + 'px';
  });
}
