//! `trellis backup` and `trellis restore`: the whole store in one file, and back.

use std::path::Path;

use anyhow::Context;
use trellis_apiserver::backup::Backup;
use trellis_apiserver::{BACKUP_PATH, Error};

use crate::cli::Global;
use crate::connect::connect;
use crate::exit::{Ended, from_service};
use crate::incarnation;
use crate::output;

/// The file in the data directory that holds everything.
const STORE: &str = "store.redb";

/// Writes everything that is stored to a file that only its owner can read. A running service goes on meanwhile.
pub async fn backup(global: &Global, file: &Path) -> anyhow::Result<()> {
    let store = global.data.join(STORE);
    let backup = match Backup::of_file(&store) {
        Ok(backup) => backup,
        // A service has it open, so the service is asked.
        Err(Error::InUse { .. }) => from_running(global, file).await?,
        Err(_) if !store.exists() => from_running(global, file).await?,
        Err(error) => return Err(error.into()),
    };
    trellis_files::ensure(file, &backup.text())
        .with_context(|| format!("{} cannot be written", file.display()))?;
    output::print(&format!(
        "{} objects as of revision {} are in {}; it holds secrets, so keep it as safe as the data directory\n",
        backup.objects.len(),
        backup.revision,
        file.display()
    ))
}

async fn from_running(global: &Global, file: &Path) -> anyhow::Result<Backup> {
    let service = connect(global).await?;
    let request = http::Request::get(BACKUP_PATH).body(Vec::new())?;
    let text = service
        .client
        .request_text(request)
        .await
        .map_err(|error| from_service(error, "the store"))?;
    Ok(Backup::read(text.as_bytes(), file)?)
}

/// Replaces the content of the store by that of a backup. The previous store is kept next to it.
pub fn restore(global: &Global, file: &Path) -> anyhow::Result<()> {
    let text = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let backup = Backup::read(&text, file)?;
    trellis_files::make_directory(&global.data)
        .with_context(|| format!("{} cannot be made", global.data.display()))?;
    let restored = match backup.restore(&global.data.join(STORE)) {
        Ok(restored) => restored,
        Err(error @ Error::InUse { .. }) => {
            return Err(Ended::Refused(format!("{error}; nothing was changed")).into());
        }
        Err(error) => return Err(error.into()),
    };
    // What was in use then need not be now. It is brought back, as after a restart of the machine.
    incarnation::begin(&global.data)
        .with_context(|| format!("{} cannot be written to", global.data.display()))?;
    let mut said = format!(
        "{} objects as of revision {} are restored; start the service with `trellis up`\n",
        restored.objects, backup.revision
    );
    if let Some(aside) = restored.aside {
        said.push_str(&format!(
            "the store that was there is kept as {}\n",
            aside.display()
        ));
    }
    said.push_str(
        "volumes keep the sizes that they have; copies that were made since are kept, shown by `trellis pool ls`, and \
         taken in by `trellis recover --from-pools`; what was mounted when the backup was made is mounted again\n",
    );
    output::print(&said)
}
