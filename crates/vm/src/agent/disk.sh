# Functions that both scripts begin with. Plain POSIX sh, for guests with little more than busybox.

# The kernel's name of the disk with a serial number.
disk_of() {
    for dir in /sys/block/*; do
        if [ -r "$dir/serial" ]; then
            serial=$(cat "$dir/serial" 2>/dev/null)
        elif [ -r "$dir/device/vpd_pg80" ]; then
            serial=$(tail -c +5 "$dir/device/vpd_pg80" 2>/dev/null | tr -d '\000' | sed 's/^ *//; s/ *$//')
        else
            continue
        fi
        if [ "$serial" = "$1" ]; then
            echo "${dir##*/}"
            return
        fi
    done
}

# Where a disk or partition is mounted: kind and mount point, as mountinfo writes them, the first mount first.
mounts_of() {
    number=$(cat "/sys/class/block/$1/dev")
    while read -r _ _ device _ at rest; do
        kind=${rest#* - }
        source=${kind#* }
        source=${source%% *}
        kind=${kind%% *}
        # btrfs has device numbers of its own, so it is known by its source.
        if [ "$device" = "$number" ] || { [ "$kind" = btrfs ] && [ "$(readlink -f "$source")" = "/dev/$1" ]; }; then
            echo "$kind $at"
        fi
    done </proc/self/mountinfo
}

# A disk and its partitions, the partitions in the order of their places.
parts_of() {
    for dir in "/sys/block/$1/$1"*; do
        [ -r "$dir/start" ] && echo "$(cat "$dir/start") ${dir##*/}"
    done | sort -n | while read -r _ name; do
        echo "$name"
    done
}

bytes_of() {
    echo $(($(cat "/sys/class/block/$1/size") * 512))
}
