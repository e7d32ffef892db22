#!/bin/sh
# disks list | size SERIAL | write SERIAL AT_KIB KIB WORD | sum SERIAL AT_KIB KIB | name SERIAL
# Places and lengths are in KiB, in multiples of 64.
serial_of() {
    if [ -r "$1/serial" ]; then
        cat "$1/serial"
    elif [ -r "$1/device/vpd_pg80" ]; then
        tail -c +5 "$1/device/vpd_pg80"
    fi
}
name_of() {
    for dir in /sys/block/[sv]d*; do
        if [ "$(serial_of "$dir")" = "$1" ]; then
            echo "${dir##*/}"
            return
        fi
    done
}
if [ "$1" = list ]; then
    for dir in /sys/block/[sv]d*; do
        [ -r "$dir/size" ] && echo "$(serial_of "$dir") $(($(cat "$dir/size") * 512))"
    done
    exit 0
fi
name=$(name_of "$2")
case $1 in
name) echo "$name" ;;
size) [ -z "$name" ] || echo $(($(cat "/sys/block/$name/size") * 512)) ;;
write)
    yes "$5" | head -c "$(($4 * 1024))" | dd "of=/dev/$name" bs=64k iflag=fullblock "seek=$(($3 / 64))" conv=notrunc,fsync 2>/dev/null || exit 1
    yes "$5" | head -c "$(($4 * 1024))" | sha256sum | cut -d' ' -f1
    ;;
sum)
    blockdev --flushbufs "/dev/$name"
    dd "if=/dev/$name" bs=64k "skip=$(($3 / 64))" "count=$(($4 / 64))" 2>/dev/null | sha256sum | cut -d' ' -f1
    ;;
esac
