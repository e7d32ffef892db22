# Makes a disk ready for its removal: $1 serial number, $2 `refuse` or `unmount` what is mounted.
# Prints one `used ...` a line for whatever still uses it; none means that it is free and written back.

disk=$(disk_of "$1")
if [ -z "$disk" ]; then
    echo absent
    exit 0
fi
for part in $(parts_of "$disk") "$disk"; do
    if [ "$2" = unmount ]; then
        # The last mount first: it may be inside an earlier one.
        mounts_of "$part" | sed '1!G;h;$!d' | while read -r _ at; do
            umount "$(printf '%b' "$at")" 2>/dev/null
        done
    fi
    mounts_of "$part" | while read -r kind at; do
        echo "used mount $at"
    done
    for holder in "/sys/class/block/$part/holders/"*; do
        [ -e "$holder" ] && echo "used holder ${holder##*/}"
    done
    grep -q "^/dev/$part " /proc/swaps && echo "used swap /dev/$part"
done
sync
blockdev --flushbufs "/dev/$disk" 2>/dev/null
exit 0
