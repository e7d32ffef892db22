# Grows what is on a disk, as far as it is one filesystem: $1 serial number, $2 size that the disk must have.
# Prints what it found and did, one `word value...` a line. `held` is the last line if it could not go on.

held() {
    echo "held $*"
    exit 0
}
filesystem_bytes() {
    set -- $(stat -f -c '%b %S' "$1")
    echo $(($1 * $2))
}
# Runs a tool. If it fails, the last lines of what it said are the reason.
tool() {
    command -v "$1" >/dev/null || held no-tool "$1"
    said=$("$@" 2>&1 </dev/null) || held tool-failed "$1" $(echo "$said" | tail -n 3 | tr '\n' ' ')
}

disk=$(disk_of "$1")
[ -n "$disk" ] || held no-disk
size=$(bytes_of "$disk")
echo "disk $disk $size"
[ "$size" -ge "$2" ] || held disk-smaller "$size"

part=$(parts_of "$disk" | tail -n 1)
if [ -n "$part" ]; then
    number=$(cat "/sys/class/block/$part/partition")
    before=$(bytes_of "$part")
    end=$((($(cat "/sys/class/block/$part/start") * 512) + before))
    # A GPT keeps a copy of itself behind the last partition, and tools leave up to a mebibyte.
    if [ $((size - end)) -gt 1048576 ]; then
        if command -v growpart >/dev/null; then
            tool growpart "/dev/$disk" "$number"
        else
            command -v sfdisk >/dev/null || held no-tool sfdisk
            said=$(echo ', +' | sfdisk --no-reread --force -N "$number" "/dev/$disk" 2>&1) ||
                held tool-failed sfdisk $(echo "$said" | tail -n 3 | tr '\n' ' ')
            # The kernel does not read a table again while a partition is in use; partx tells it of this one.
            [ "$(bytes_of "$part")" -gt "$before" ] || tool partx --update --nr "$number" "/dev/$disk"
        fi
        [ "$(bytes_of "$part")" -gt "$before" ] || held partition-stays "$part"
    fi
    echo "partition $part $before $(bytes_of "$part")"
else
    part=$disk
fi

for holder in "/sys/class/block/$part/holders/"*; do
    [ -e "$holder" ] && held stacked "${holder##*/}"
done
set -- $(mounts_of "$part" | head -n 1)
[ $# -gt 0 ] || held not-mounted "$part"
kind=$1
at=$(printf '%b' "$2")
before=$(filesystem_bytes "$at")
case $kind in
ext2 | ext3 | ext4) tool resize2fs "/dev/$part" ;;
xfs) tool xfs_growfs "$at" ;;
btrfs) tool btrfs filesystem resize max "$at" ;;
*) held unknown-filesystem "$kind" ;;
esac
echo "filesystem $kind $before $(filesystem_bytes "$at") $2"
