//! What this process costs, under the names that every Prometheus client uses.

use k8s_openapi::jiff::Timestamp;

use super::text::{Family, Value};

/// The families; those that the kernel does not report are left out.
pub fn families(started: Timestamp) -> Vec<Family> {
    let mut families = vec![
        cpu(),
        Family::gauge(
            "process_start_time_seconds",
            "When the service began, in seconds since the epoch.",
            &[],
        )
        .with(Vec::new(), Value::Real(started.as_duration().as_secs_f64())),
    ];
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let sizes = [
        (
            "process_resident_memory_bytes",
            "Memory that the process has in RAM.",
            "VmRSS:",
        ),
        (
            "process_virtual_memory_bytes",
            "Address space of the process.",
            "VmSize:",
        ),
    ];
    for (name, help, field) in sizes {
        if let Some(bytes) = kibibytes(&status, field) {
            families.push(Family::gauge(name, help, &[]).with(Vec::new(), Value::Whole(bytes)));
        }
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        let open = u64::try_from(open.count()).unwrap_or(u64::MAX);
        let family = Family::gauge("process_open_fds", "File descriptors that are open.", &[]);
        families.push(family.with(Vec::new(), Value::Whole(open)));
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(limit) = limit {
        let family = Family::gauge("process_max_fds", "File descriptors that may be open.", &[]);
        families.push(family.with(Vec::new(), Value::Whole(limit)));
    }
    families
}

fn cpu() -> Family {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let spent = std::time::Duration::try_from(spent).unwrap_or_default();
    Family::counter(
        "process_cpu_seconds_total",
        "Processor time of the process.",
        &[],
    )
    .with(Vec::new(), Value::Real(spent.as_secs_f64()))
}

/// A field of `/proc/self/status` in bytes; the kernel reports kibibytes.
fn kibibytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let number = line.trim().strip_suffix("kB")?.trim();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a field is taken for another, or its unit is forgotten.
    #[test]
    fn memory_is_read_in_bytes() {
        let status = "VmPeak:\t  90 kB\nVmSize:\t  80 kB\nVmRSS:\t     7 kB\nThreads:\t3\n";
        assert_eq!(kibibytes(status, "VmRSS:"), Some(7 * 1024));
        assert_eq!(kibibytes(status, "VmSize:"), Some(80 * 1024));
        assert_eq!(kibibytes(status, "Threads:"), None);
        assert_eq!(kibibytes(status, "VmSwap:"), None);
    }
}
