//! A volume whose writes wait until they are let go.

use std::sync::Mutex;

use super::*;

/// A volume whose writes wait until they are let go.
#[derive(Default)]
pub struct Held {
    waiting: Mutex<Vec<oneshot::Sender<()>>>,
}

impl Held {
    pub fn release(&self) {
        for each in self.waiting.lock().unwrap().drain(..) {
            let _gone = each.send(());
        }
    }

    pub fn held(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }
}

impl Lun for Held {
    fn identity(&self) -> Identity {
        Identity {
            serial: "held".to_owned(),
            naa: [1; 16],
        }
    }
    fn block_size(&self) -> u32 {
        512
    }
    fn size(&self) -> u64 {
        64 * MIB
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        false
    }
    fn read(&self, _offset: u64, len: u32) -> Answer<Chunks> {
        Answer::Now(Ok(vec![Bytes::from(vec![
            0;
            usize::try_from(len).unwrap()
        ])]))
    }
    fn write(&self, _offset: u64, _data: Chunks, _fua: bool) -> Answer<()> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().unwrap().push(sender);
        Answer::later(async move { receiver.await.map_err(|_| LunError::Medium) })
    }
    fn zero(&self, _offset: u64, _len: u64, _deallocate: bool) -> Answer<()> {
        Answer::Now(Ok(()))
    }
    fn flush(&self) -> Answer<()> {
        Answer::Now(Ok(()))
    }
    fn compare_and_write(&self, _: u64, _: Chunks, _: Chunks, _: bool) -> Answer<Compared> {
        Answer::Now(Ok(Compared::Written))
    }
    fn extents(&self, _offset: u64, len: u64, _extents_max: usize) -> Answer<Vec<Extent>> {
        Answer::Now(Ok(vec![Extent { len, mapped: true }]))
    }
}
