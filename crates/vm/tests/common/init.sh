#!/bin/sh
# Process 1 of the tests' guest: loads modules, starts the agent, and switches off when the power button is pressed.
export PATH=/usr/sbin:/sbin:/usr/bin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "$module"
done </etc/modules
mkdir -p /dev/virtio-ports
for port in /sys/class/virtio-ports/*; do
    ln -s "../${port##*/}" "/dev/virtio-ports/$(cat "$port/name")"
done
qemu-ga -d -p /dev/virtio-ports/org.qemu.guest_agent.0 -t /run -f /run/qga.pid -l /run/qga.log
# Nobody presses anything here but the button.
for input in /dev/input/event*; do
    (head -c 24 "$input" >/dev/null && sync && poweroff -f) &
done
while :; do
    sleep 3600
done
