//! Writes that are on their way to the queue.
//!
//! A controller sends the writes of one plan at the same moment, but they reach the queue one after the other. The
//! writer thread would make the first durable alone, and the rest would wait for a second flush. So a request that
//! will write announces itself when it is called, and the writer waits a moment for announced writes that are not
//! queued yet.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many requests have said that they will write and have not done so yet.
#[derive(Debug, Default)]
pub(crate) struct Arrivals(AtomicUsize);

impl Arrivals {
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// One of them; it has arrived, or never will, when this is dropped.
#[derive(Debug)]
pub(crate) struct Arriving(Arc<Arrivals>);

impl Arriving {
    pub(crate) fn new(arrivals: &Arc<Arrivals>) -> Arriving {
        arrivals.0.fetch_add(1, Ordering::AcqRel);
        Arriving(Arc::clone(arrivals))
    }

    /// Runs `request`, in which the first write that is queued ends the arrival.
    pub(crate) async fn during<T>(self, request: impl Future<Output = T>) -> T {
        ARRIVING.scope(RefCell::new(Some(self)), request).await
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

tokio::task_local! {
    static ARRIVING: RefCell<Option<Arriving>>;
}

/// The write of the present request has been queued.
pub(super) fn arrived() {
    let taken = ARRIVING.try_with(|arriving| arriving.borrow_mut().take());
    // Writes of the store's own do not come by a request.
    drop(taken);
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a request that was refused before it wrote anything is waited for without end.
    #[tokio::test]
    async fn a_request_that_never_writes_is_not_waited_for() {
        let arrivals = Arc::new(Arrivals::default());
        let arriving = Arriving::new(&arrivals);
        assert!(arrivals.any());
        arriving.during(async {}).await;
        assert!(!arrivals.any());
    }

    // Fails if the writer would wait for a request whose write it already has.
    #[tokio::test]
    async fn a_queued_write_has_arrived() {
        let arrivals = Arc::new(Arrivals::default());
        let arriving = Arriving::new(&arrivals);
        let waits = arriving.during(async {
            arrived();
            arrivals.any()
        });
        assert!(!waits.await);
    }
}
